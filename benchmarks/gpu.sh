#!/usr/bin/env bash
# What only a GPU can show, in one command of under ten minutes:
#
#     bash benchmarks/gpu.sh [OUT]        # PYTHON=... for another interpreter than .venv/bin/python or python3
#
# Writes OUT/<part>.json and OUT/<part>.log for every part, and prints a line for each: its exit status and seconds.
#   environment      versions and the device
#   large_model      8B backbone: a pass over 64 nodes and a whole step with drafting as multiples of a plain step, CUDA graphs, bandwidth
#   large_training   8B backbone: tokens per second, time by part, memory, the objective against its matrix products
#   train            EAGLE-3 on the embedded backbone through accelerate, one process (and NCCL, FSDP2 with one process)
#   heads_*          every kind of head: some steps of training, held-out prompts decoded
#   bench_*          those heads: every token identical? in fp32 and bf16, plain and with CUDA graphs, greedy and sampled, batch 1 and 8
# Without a GPU the same parts run on the CPU with tiny shapes; environment.json says so.
set -u
cd "$(dirname "$0")/.."
OUT=${1:-out/gpu}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
CUDA=$("$PYTHON" -c 'import torch; print(int(torch.cuda.is_available()))') || exit 2
LIMIT=$([ "$CUDA" = 1 ] && echo 8 || echo 1)
CAPTURE=$([ "$CUDA" = 1 ] && echo cuda-graph || echo trace)

part() {   # part NAME LIMIT_SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    printf '%-24s exit %3d  %4d s\n' "$name" "$status" $((SECONDS - start))
}

launch() { "$PYTHON" -m accelerate.commands.launch "$@"; }
export -f launch
export PYTHON

part environment 60 "$PYTHON" benchmarks/environment.py --json "$OUT/environment.json"
part large_model 150 "$PYTHON" benchmarks/large_model.py --json "$OUT/large_model.json"
part large_training 150 "$PYTHON" benchmarks/large_training.py --json "$OUT/large_training.json"
QUICK="recipes/quickstart/eagle3.yaml train.steps=${STEPS:-150} eval.prompts=2 eval.every=0 save.every=0"
part train 120 bash -c "launch train_heads.py $QUICK save.dir=$OUT/heads"
QUICK="recipes/quickstart/eagle3.yaml train.steps=10 eval.prompts=1 eval.every=0 save.every=0"
part train_nccl 60 "$PYTHON" -m torch.distributed.run --nproc_per_node 1 train_heads.py $QUICK save.dir="$OUT/nccl"
part train_fsdp2 60 bash -c "launch --config_file recipes/accelerate/fsdp2.yaml --num_processes 1 train_heads.py $QUICK save.dir=$OUT/fsdp2"
for kind in block draft_model eagle hydra medusa mlp mtp; do
    part "heads_$kind" 60 bash -c "launch train_heads.py recipes/quickstart/$kind.yaml train.steps=10 eval.prompts=1 eval.max_new_tokens=16 eval.every=0 save.every=0 save.dir=$OUT/$kind" &
done
wait
for dtype in fp32 bf16; do
    for capture in off $CAPTURE; do
        part "bench_${dtype}_$capture" 90 "$PYTHON" -m headstart.cli bench --heads "$OUT/heads" --prompts recipes/quickstart/prompts.jsonl \
            --limit "$LIMIT" --max-new-tokens 48 --temperature 0 1 --batch-size 1 8 --dtype $dtype --capture $capture \
            --json "$OUT/bench_${dtype}_$capture.json"
    done
done
