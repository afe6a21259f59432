#!/usr/bin/env bash
# Installs vLLM's CPU build in an environment of its own, .venv-engines (3.6 GB), SGLang's package beside it, and llama.cpp in .venv-llamacpp (0.1 GB). Where
# vLLM cannot be installed: one line, exit status 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=tests/engines
folder=.venv-engines

fail() {
  echo "vLLM 0.32.0 (CPU build) cannot be installed in $folder: $1" >&2
  exit 1
}

llamacpp=.venv-llamacpp
if [ ! "$llamacpp/.installed" -nt "$here/llamacpp.txt" ]; then
  { "${PYTHON:-python3}" -m venv "$llamacpp" && "$llamacpp/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
    -r "$here/llamacpp.txt"; } >/dev/null 2>&1 && touch "$llamacpp/.installed" ||
    { rm -rf "$llamacpp"; echo "xllamacpp 2026.10.11549 (llama.cpp) cannot be installed in $llamacpp; its test will be skipped"; }
fi

newest=$(ls -t "$here/requirements.txt" "$here/vllm.txt" "$here/sglang.txt" | head -1)
[ "$folder/.installed" -nt "$newest" ] && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || fail "it is built for Linux on x86-64, and this is $(uname -sm)"
[ "$(df --output=avail -k . | tail -1)" -gt 5000000 ] || fail "it needs 5 GB of disk"
echo "installing vLLM 0.32.0 (CPU build) in $folder: 3.6 GB, some minutes; log in $folder/install.log"
"${PYTHON:-python3}" -m venv "$folder" || fail "${PYTHON:-python3} -m venv failed"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
{ "${pip[@]}" -r "$here/requirements.txt" && "${pip[@]}" --no-deps --require-hashes -r "$here/vllm.txt"; } >"$folder/install.log" 2>&1 ||
  fail "$(grep -a ERROR "$folder/install.log" | tail -1) (see $folder/install.log)"
"${pip[@]}" --no-deps --require-hashes --upgrade --target "$folder/sglang" -r "$here/sglang.txt" >>"$folder/install.log" 2>&1 ||
  { rm -rf "$folder/sglang"; echo "SGLang 0.5.23 cannot be installed beside it; its test will be skipped (see $folder/install.log)"; }
touch "$folder/.installed"
