# Short names for what CONTRIBUTING.md describes: https://just.systems

# what is quick: format, lints, the core's and the gateway's unit tests
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test -p keyway-core -p keyway-wire -p keyway-clients -p keyway-lines
    cargo test -p keyway --lib

# everything, as CI does
test:
    .ci/run

# end-to-end tests whose name has PATTERN
e2e PATTERN="":
    cargo test -p keyway-tests --test e2e {{PATTERN}}

# the routing core's benchmarks
bench NAME="index":
    cargo bench -p keyway-core --bench {{NAME}}

# two builds of the gateway on one core: CPU per request and event
against BASE:
    tests/external/data_plane/run.sh at-once --base {{BASE}}

# where a running gateway's time goes, for ten seconds
profile PID:
    perf record -g -p {{PID}} -- sleep 10
    perf report
