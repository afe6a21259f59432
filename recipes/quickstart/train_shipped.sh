#!/usr/bin/env bash
# Trains candidates for the heads that ship with the embedded backbone, and decodes the held-out prompts with each:
#
#     bash recipes/quickstart/train_shipped.sh [OUT]
#
# On an H100 some minutes: 40,000 passages of the backbone's own text beside those that ship, 2,400 steps of about 4,100 tokens. The heads
# that ship (as bf16) are from two CPU cores, an hour to an hour and a half each; EAGLE-3 in two processes of one thread:
#
#     PASSAGES=4000 STEPS=1800 CACHE=1 CANDIDATES=mlp bash recipes/quickstart/train_shipped.sh
#     export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 PASSAGES=4000 BATCH=8 LAUNCH="--multi_gpu --num_processes 2"
#     STEPS=3600 CANDIDATES=eagle3 bash recipes/quickstart/train_shipped.sh
#     STEPS=600 CANDIDATES=eagle3-full bash recipes/quickstart/train_shipped.sh     # goes on with the whole vocabulary
#
# PYTHON: another interpreter. LAUNCH: options of accelerate launch. CACHE: train from the backbone's cached states, which pays on a CPU. Each
# candidate has at most 8 MB in bf16. Writes OUT/NAME (the heads), OUT/NAME.log and OUT/NAME.json (`headstart bench` in trees of 12 nodes),
# and skips candidates that are there. The exit status is 1 if one failed; its log says why.
set -u
FAILED=0
cd "$(dirname "$0")/../.."
OUT=${1:-out/shipped}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
[ -e "$OUT/train.jsonl.gz" ] || "$PYTHON" recipes/quickstart/write_text.py --out "$OUT" --passages "${PASSAGES:-40000}" --seed 1 || exit

candidate() {   # candidate NAME RECIPE a.b=c...
    local name=$1 recipe=recipes/quickstart/$2.yaml
    shift 2
    [[ " ${CANDIDATES:-$name} " != *" $name "* ]] || [ -e "$OUT/$name.json" ] && return
    local given=("data.train=[quickstart:train.jsonl.gz,$OUT/train.jsonl.gz]" data.eval=recipes/quickstart/prompts.jsonl train.batch_size="${BATCH:-16}" "$@")
    {
        if [ -n "${CACHE:-}" ]; then
            given+=(cache.dir="$OUT/cache-$name")
            "$PYTHON" -m headstart.cli cache "$recipe" "${given[@]}"
        fi &&
            "$PYTHON" -m accelerate.commands.launch ${LAUNCH:-} train_heads.py "$recipe" "${given[@]}" train.steps="${STEPS:-2400}" train.optimizer=auto \
                train.lr=auto eval.every=0 save.every=200 save.dir="$OUT/$name" &&
            "$PYTHON" -m headstart.cli bench --heads "$OUT/$name" --prompts recipes/quickstart/prompts.jsonl --limit 16 --prompt-tokens 64 \
                --max-new-tokens 44 --temperature 0 1 --nodes 12 --width 4 --json "$OUT/$name.json"
    } >"$OUT/$name.log" 2>&1
    local status=$?
    printf '%-16s exit %d\n' "$name" $status
    [ $status = 0 ] || FAILED=1
}

candidate eagle3 eagle3
candidate eagle3-full eagle3 drafter.init="$OUT/eagle3" drafter.draft_vocab_size=null seed=1
candidate mlp mlp drafter.tie_weights=true drafter.depth=5
candidate block block drafter.layers=2 drafter.intermediate_size=768 drafter.correction_rank=32
candidate mtp mtp drafter.shared=true
exit $FAILED
