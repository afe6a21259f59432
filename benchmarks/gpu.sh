#!/usr/bin/env bash
# What only a GPU can show, with a real model, in one command of under eight minutes:
#
#     bash benchmarks/gpu.sh [MODEL] [OUT]        # out/gpu
#
# MODEL: a folder or a GGUF file; where MODEL.00, MODEL.01, ... lie instead, these are joined. None: the embedded model.
#   PYTHON    another interpreter than .venv/bin/python or python3         SITE     a folder of packages that it lacks
#   DATA      conversations to train on and to answer (JSON lines)         PROMPTS  prompts to decode
#   HEADS     trained heads, in place of those trained here                PARTS    only these parts, by name
#   TOTAL     seconds for everything (470): a part that is begun late gets what is left
#
# Writes OUT/<part>.json and OUT/<part>.log, and prints a line for each part: its exit status and seconds. What is most in doubt comes first:
#   environment         versions, the device and what was measured
#   convert             MODEL as a folder, by Headstart's own loader
#   ar_graph            AR and n-gram drafts with CUDA graphs: tokens/s, verdict (exit 1: a token or logit is off by more than rounding)
#   train               EAGLE-3 of depth 5, 300 steps: tokens/s
#   heads_graph, _off   those heads: tau, x AR, verdict; batch 1 and 8
#   regenerate          answers to questions, 64 rows at once: tokens/s
#   step, step_8b       a pass and a whole step with 64 nodes as multiples of a plain step: this model, and random weights at an 8B shape
#   profile             the kernels of decoding steps with 1, 8 and 64 nodes
#   training, training_compiled     milliseconds of the parts of a training step, without and with train.compile
# Without a GPU the same parts run on the CPU with small sizes and no limit worth the name; environment.json says so.
set -u
cd "$(dirname "$0")/.."
MODEL=${1:-embedded} OUT=${2:-out/gpu}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${SITE:+:$SITE} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
PROMPTS=${PROMPTS:-recipes/quickstart/prompts.jsonl}
mkdir -p "$OUT"
CUDA=$("$PYTHON" -c 'import torch; print(int(torch.cuda.is_available()))') || exit 2
if [ "$CUDA" = 1 ]; then
    TOTAL=${TOTAL:-470} SLOWER=1 GRAPH=cuda-graph NOTE="$MODEL"
    SIZES="--limit 8 --max-new-tokens 32 --batch-size 1 8 --dtype bf16 --threads 8"
    STEPS="train.steps=300 train.batch_size=16 train.micro_batch=16 data.max_length=512 eval.prompts=4 eval.max_new_tokens=32"
    ANSWERS="regenerate.limit=128 regenerate.max_new_tokens=128 regenerate.batch_size=64"
else
    TOTAL=${TOTAL:-7200} SLOWER=8 GRAPH=trace NOTE="$MODEL on a CPU, in small sizes: no figure says anything of a GPU"
    SIZES="--limit 2 --max-new-tokens 12 --batch-size 1 2 --dtype bf16"
    STEPS="train.steps=3 train.batch_size=2 train.micro_batch=2 data.max_length=128 eval.prompts=1 eval.max_new_tokens=8"
    ANSWERS="regenerate.limit=4 regenerate.max_new_tokens=8 regenerate.batch_size=4"
fi

part() {   # part NAME LIMIT_SECONDS COMMAND...
    local name=$1 limit=$(($2 * SLOWER)) start=$SECONDS left=$((TOTAL - SECONDS)) status
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
    if [ $left -lt 10 ]; then
        printf '%-20s not begun: the %d s are over\n' "$name" "$TOTAL"
        return
    fi
    timeout -s INT -k 10 $((limit < left ? limit : left)) "$@" >"$OUT/$name.log" 2>&1
    status=$?
    printf '%-20s exit %3d  %4d s\n' "$name" "$status" $((SECONDS - start))
}

if [ ! -e "$MODEL" ] && ls "$MODEL".[0-9]* >/dev/null 2>&1; then
    cat "$MODEL".[0-9]* >"$OUT/$(basename "$MODEL")" && MODEL=$OUT/$(basename "$MODEL")
fi
if [ -z "${DATA:-}" ]; then   # the embedded model's text to train on, and questions made of the prompts
    DATA=quickstart:train.jsonl.gz QUESTIONS=$OUT/questions.jsonl
    "$PYTHON" - "$PROMPTS" "$QUESTIONS" <<'PY' || exit 2
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
texts = [next(value if isinstance(value, str) else str(value[0]) for key, value in row.items() if key in ("text", "prompt", "turns")) for row in rows]
with open(sys.argv[2], "w") as out:
    for text in texts:
        out.write(json.dumps({"messages": [{"role": "user", "content": text[:400]}, {"role": "assistant", "content": "-"}]}) + "\n")
PY
fi
cat >"$OUT/recipe.yaml" <<YAML
backbone: {path: $OUT/model, dtype: bf16}
drafter: {kind: eagle3, depth: 5, draft_vocab_size: $([ "$MODEL" = embedded ] && echo 2048 || echo 8192)}
data: {train: "$DATA", eval: "$PROMPTS"}
save: {dir: $OUT/heads, every: 100}
YAML
HEADS=${HEADS:-$OUT/heads}
BENCH="headstart.cli bench --backbone $OUT/model --prompts $PROMPTS $SIZES"

part environment 30 "$PYTHON" benchmarks/environment.py --note "$NOTE" --json "$OUT/environment.json"
part convert 90 "$PYTHON" benchmarks/convert.py "$MODEL" "$OUT/model" --json "$OUT/convert.json"
part ar_graph 60 "$PYTHON" -m $BENCH --propose suffix recycling --capture $GRAPH --json "$OUT/ar_graph.json"
part train 100 "$PYTHON" -m headstart.cli train "$OUT/recipe.yaml" $STEPS
part heads_graph 75 "$PYTHON" -m $BENCH --heads "$HEADS" --allow-finetuned --capture $GRAPH --json "$OUT/heads_graph.json" --temperature 0 1
part heads_off 75 "$PYTHON" -m $BENCH --heads "$HEADS" --allow-finetuned --capture off --json "$OUT/heads_off.json"
part regenerate 50 "$PYTHON" -m headstart.cli regenerate "$OUT/recipe.yaml" data.train="${QUESTIONS:-$DATA}" regenerate.out="$OUT/answers.jsonl" $ANSWERS
part step_8b 60 "$PYTHON" benchmarks/large_model.py --json "$OUT/step_8b.json"
part step 40 "$PYTHON" benchmarks/large_model.py --backbone "$OUT/model" --json "$OUT/step.json"
part profile 30 "$PYTHON" benchmarks/large_model.py --backbone "$OUT/model" --profile --json "$OUT/profile.json"
part training 30 "$PYTHON" benchmarks/large_training.py --backbone "$OUT/model" --rows 16 --length 512 --chunk-size 4096 --json "$OUT/training.json"
part training_compiled 45 "$PYTHON" benchmarks/large_training.py --backbone "$OUT/model" --rows 16 --length 512 --chunk-size 4096 --compile \
    --json "$OUT/training_compiled.json"
