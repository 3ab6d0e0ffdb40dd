#!/bin/sh
# Records the sample runs anew, all or those named: sample_traces/record.sh [NAME ...]
set -e
cd "$(dirname "$0")"
stepscope=${STEPSCOPE:-../.venv/bin/stepscope}

record() {
    name=$1
    shift
    rm -rf "./$name"
    "$stepscope" run "$@" --device cpu --quiet --out "$name"
    echo "stepscope run $* --device cpu --out $name" > "$name/command.txt"
}

simulate() {
    name=$1
    shift
    rm -rf "./$name"
    "$stepscope" schedule "$@" --quiet --out "$name" > /dev/null
    echo "stepscope schedule $* --out $name" > "$name/command.txt"
}

for name in ${*:-dp4 dp2_pp2_1f1b dp2_pp2_gpipe dp4_slow_rank pp4_slow_stage}; do
    case $name in
        dp4) record "$name" --dp 4 --microbatches 2 --steps 6 ;;
        dp2_pp2_1f1b) record "$name" --dp 2 --pp 2 --schedule 1f1b --microbatches 8 --steps 6 ;;
        dp2_pp2_gpipe) record "$name" --dp 2 --pp 2 --schedule gpipe --microbatches 8 --steps 6 ;;
        dp4_slow_rank) record "$name" --dp 4 --microbatches 2 --steps 6 --slow-rank 1 --slow-ms 30 ;;
        pp4_slow_stage) simulate "$name" --pp 4 --microbatches 8 --slow-stage 2 --transfer 0.1 --steps 3 ;;
        *) echo "no such sample: $name" >&2; exit 2 ;;
    esac
done
