#!/usr/bin/env bash
# From conversations to measured heads: regenerate the answers with the model, train heads on them, benchmark on held-out ones.
#
#   recipes/conversations/run.sh [OPTION ...] MODEL CONVERSATIONS OUT [section.key=value ...]
#
#   MODEL               a chat model: a folder or hub id
#   CONVERSATIONS       a file (.jsonl, .json, .csv, .parquet, ...) of messages or conversations (ShareGPT), or the name of a dataset
#   OUT                 a folder for all results
#   section.key=value   of recipes/conversations/eagle3.yaml (docs/recipe.md), for all steps: data.limit=2000 train.epochs=1
#
#   --held-out N        rows held out of training to evaluate on, and as many others to benchmark on (40)
#   --max-new-tokens N  tokens that the benchmark generates after each prompt (128)
#   --processes N       processes that train, one per GPU (1)
#   --no-plan           skip the plan; for questions without answers, of which inspect has no sample to show
#   --no-cache          run the model at every training step: slower, but needs no disk space for its hidden states
#   --until STEP        stop after plan, regenerate, cache or train (bench)
#
# Steps, and their results in OUT:
#   plan        memory, disk and time; a sample with its loss mask                  plan.json inspect.json
#   regenerate  the model's own answers, and the rows held out of them              answers.jsonl data/
#   cache       target hidden states; their size is printed first                   features/
#   train       the heads                                                           heads/
#   bench       heads (adaptive and fixed tree sizes), autoregressive decoding
#               and transformers at temperature 0 and 1                             report.json report.html
#
# The same command resumes where it was stopped and skips finished steps (OUT/done records their settings). With other settings
# a step that would have to run again says what to delete. PYTHON is the interpreter (.venv of the clone, else python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
recipe=$root/recipes/conversations/eagle3.yaml
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

mistake() { echo "error: $*" >&2; exit 2; }

number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || mistake "$1 is a whole number of at least 1; got '$2'"; }

held_out=40 new_tokens=128 processes=1 plan=yes cache=yes last=bench
places=() overrides=()
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --no-plan) plan=no ;;
    --no-cache) cache=no ;;
    --held-out | --max-new-tokens | --processes | --until)
      (($# > 1)) || mistake "$1 needs a value (see --help)"
      case $1 in
        --held-out) number "$1" "$2"; held_out=$2 ;;
        --max-new-tokens) number "$1" "$2"; new_tokens=$2 ;;
        --processes) number "$1" "$2"; processes=$2 ;;
        --until)
          known='plan, regenerate, cache, train or bench'
          [[ $2 =~ ^(plan|regenerate|cache|train|bench)$ ]] || mistake "--until is $known; got '$2'"
          last=$2 ;;
      esac
      shift ;;
    -*) mistake "unknown option $1 (see --help)" ;;
    *) if ((${#places[@]} < 3)); then places+=("$1"); else overrides+=("$1"); fi ;;
  esac
  shift
done
((${#places[@]} == 3)) || mistake "three arguments are needed, MODEL CONVERSATIONS OUT; got ${#places[@]} (see --help)"
model=${places[0]} conversations=${places[1]} out=${places[2]}
for place in "${places[@]}"; do
  [[ -n $place && ! $place =~ ^[a-z_]+(\.[a-z_]+)*= ]] || mistake "MODEL CONVERSATIONS OUT come before section.key=value; got '$place'"
done
for change in ${overrides[@]+"${overrides[@]}"}; do
  [[ $change == ?*=* ]] || mistake "'$change' is no setting; write section.key=value, as in train.epochs=1"
  case $change in
    backbone.path=* | data.train=* | data.eval=* | regenerate.out=* | cache.dir=* | save.dir=*)
      mistake "${change%%=*} is given by MODEL, CONVERSATIONS and OUT; leave $change out" ;;
    data.eval_rows=*) mistake "data.eval_rows is given by --held-out; leave $change out" ;;
  esac
done
[[ ! -e $out || -d $out ]] || mistake "OUT is a folder; $out is a file"

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  if [[ -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi
found='import torch; from importlib.util import find_spec as find
print(bool(find("transformers") and find("accelerate")), torch.cuda.is_available())'
read -r installed gpu < <("$python" -c "$found" 2>/dev/null || echo False False)
[[ $installed == True ]] || mistake "$python cannot run headstart; install it (make install), or name the interpreter with PYTHON"
mkdir -p "$out/done" 2>/dev/null || mistake "$out cannot be made; choose another OUT"

# relevant PREFIX ...: the overrides a step depends on, for its note in OUT/done.
relevant() {
  local change prefix
  for change in ${overrides[@]+"${overrides[@]}"}; do
    for prefix in "$@"; do if [[ $change == "$prefix"* ]]; then printf ' %s' "$change"; fi; done
  done
}

before=()   # the notes of the steps so far: a step depends on them all
# step NAME OUTPUT NOTE COMMAND...: run the command, unless it is known to have made OUTPUT by what NOTE says, after the same steps.
step() {
  local name=$1 output=$2 note=$3
  shift 3
  before+=("$name: $note")
  local notes
  notes=$(printf '%s\n' "${before[@]}")
  if [[ -e $output && -f $out/done/$name && $(<"$out/done/$name") == "$notes" ]]; then
    echo "== $name: done before, $output"
    return
  fi
  echo "== $name: $output"
  if [[ ! -e $output ]]; then rm -f "$out/done/$name"; fi
  # Answers get their name when they are whole, and are refused if they have it: a kill just then is not to cost them.
  if [[ ! -e $output && $name == regenerate ]]; then remember; fi
  "$@"
  local later   # what was done after it was done with something else
  for later in $(sed -n "s/.* $name //p" <<< " regenerate hold-out cache train bench "); do rm -f "$out/done/$later"; done
  remember
}

# remember: write down by what a step is done (variables of `step`).
remember() { printf '%s\n' "$notes" > "$out/done/.$name" && mv "$out/done/.$name" "$out/done/$name"; }

leave_after() { if [[ $last == "$1" ]]; then echo "stopped after $1 (--until); without --until the same command continues"; exit 0; fi; }

headstart() { "$python" -m headstart.cli "$@"; }

train() {
  if ((processes == 1)); then   # an error is then one line; torchrun would add a report of its own
    "$python" "$root/train_heads.py" "$@"
    return
  fi
  if [[ $gpu != True ]]; then export ACCELERATE_USE_CPU=true; fi
  "$python" -m torch.distributed.run --nproc-per-node "$processes" "$root/train_heads.py" "$@"
}

settings=("backbone.path=$model" "save.dir=$out/heads")
settings+=(${overrides[@]+"${overrides[@]}"})
features=(cache.dir=null)
if [[ $cache == yes ]]; then features=("cache.dir=$out/features"); fi
asked=("data.train=$conversations" data.eval=null "data.eval_rows=$((2 * held_out))" "regenerate.out=$out/answers.jsonl")
learned=("data.train=$out/data/train.jsonl" "data.eval=$out/data/eval.jsonl" "data.eval_rows=$held_out")
learned+=(data.format=auto data.column=null data.limit=null)
shown=()   # what the commands that know no recipe are told of it
for change in ${overrides[@]+"${overrides[@]}"}; do
  case $change in
    backbone.dtype=*) shown+=(--dtype "${change#*=}") ;;
    backbone.trust_remote_code=true) shown+=(--trust-remote-code) ;;
  esac
done

preview() {
  headstart inspect "$recipe" "${settings[@]}" "${asked[@]}" --json "$out/inspect.json"
  echo
  headstart plan "$recipe" "${settings[@]}" "${asked[@]}" "${features[@]}" --json "$out/plan.json"
}
if [[ $plan == yes ]]; then
  step plan "$out/plan.json" "$model $conversations$(relevant '') $held_out $cache" preview
  before=()   # nothing depends on it
fi
leave_after plan

step regenerate "$out/answers.jsonl" "$model $conversations$(relevant backbone. data. regenerate. seed=)" \
  headstart regenerate "$recipe" "${settings[@]}" "${asked[@]}" --json "$out/regenerate.json"
step hold-out "$out/data/train.jsonl" "$held_out" \
  "$python" "$root/recipes/conversations/hold_out.py" "$out/answers.jsonl" "$out/data" "$held_out"
leave_after regenerate

if [[ $cache == yes ]]; then
  step cache "$out/features/manifest.json" "$(relevant drafter heads cache.)" \
    headstart cache "$recipe" "${settings[@]}" "${learned[@]}" "${features[@]}" --json "$out/cache.json"
fi
leave_after cache

step train "$out/heads/headstart.json" "$(relevant drafter heads objective. train. eval. save.)" \
  train "$recipe" "${settings[@]}" "${learned[@]}" "${features[@]}"
leave_after train

step bench "$out/report.json" "$new_tokens" \
  headstart bench --heads "$out/heads" --prompts "$out/data/bench.jsonl" --skip-long --include-static-tree --temperature 0 1 \
  --max-new-tokens "$new_tokens" ${shown[@]+"${shown[@]}"} --html "$out/report.html" --json "$out/report.json"
echo "all done: $out/report.json says how fast the heads are; headstart chat --heads $out/heads talks with them"
