# Recipes; `just --list` shows them. CI runs `.ci/run`.

# Formatting and lints.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings

# The whole test suite.
test *args:
    cargo test --workspace --locked {{args}}

# Kill both binaries at random moments; a failing seed belongs into tests/seeds.txt.
crash rounds="1000":
    AERIE_CRASH_ROUNDS={{rounds}} cargo test -p aerie-tests --test crash -- --nocapture

# Each fuzz target for so many seconds. Needs a nightly compiler and cargo-fuzz.
fuzz seconds="60":
    for target in shard_header manifest_row prompts_jsonl model_config weights_index; do \
        cargo +nightly fuzz run $target -- -max_total_time={{seconds}} || exit 1; done

# The same targets without coverage to guide them, on any compiler.
fuzz-stable seconds="60":
    AERIE_FUZZ_SECONDS={{seconds}} cargo test -p extractor --test fuzz_corpus -- --nocapture

# More cases of every property, and the same mutations without libFuzzer.
properties cases="100000":
    PROPTEST_CASES={{cases}} cargo test --workspace --release

# Rate of the target beside the machine's own.
bench:
    cargo run --release --bin extractor -- bench --model models/nano-kimi

# Advisories, licences, sources, as CI does.
deny:
    .ci/deny

# What CI runs.
ci:
    .ci/run
