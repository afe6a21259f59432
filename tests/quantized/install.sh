#!/usr/bin/env bash
# Installs quantizers in an environment of their own, .venv-quantized (0.4 GB), which takes all else from .venv. What cannot be had: one line.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=tests/quantized
folder=.venv-quantized
log=$folder/install.log

newest=$(ls -t "$here/requirements.txt" "$here/gptq.txt" | head -1)
[ "$folder/.installed" -nt "$newest" ] && exit 0
"${BIN:-.venv/bin}/python" -m venv "$folder" || exit 1
theirs=$("${BIN:-.venv/bin}/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$theirs" >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
"${pip[@]}" -r "$here/requirements.txt" >"$log" 2>&1 || { echo "the quantizers cannot be installed in $folder: $(grep -a ERROR "$log" | tail -1) (see $log)" >&2; exit 1; }
"${pip[@]}" --ignore-installed -r "$here/gptq.txt" >>"$log" 2>&1 || echo "gptqmodel cannot be installed; GPTQ and AWQ are not tested (see $log)"
touch "$folder/.installed"
