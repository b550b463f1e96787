# demo: the first try.  test: all tests, on real servers.  bench: speed; parts of it with BENCH="--help".  lint: formatting, clippy, docs.
.PHONY: demo test bench lint

# The linker is a matter of build time only; a machine that sets flags of its own keeps them.
ifeq ($(shell grep -qs rustflags $(HOME)/.cargo/config.toml && echo own),)
ifneq ($(shell command -v mold),)
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS ?= -Clink-arg=-fuse-ld=mold
endif
endif

demo:
	@scripts/prepare
	@scripts/demo

# The program is built with the workspace's choice of features, as the tests are: one build of every dependency.
test:
	@scripts/prepare test
	@scripts/services provision >/dev/null
	cargo build --workspace --bin outboxd
	@scripts/test-summary cargo test --workspace --no-fail-fast

# The whole of it writes docs/benchmarks.md too.
BENCH ?= --write

bench:
	@scripts/prepare test
	@scripts/services provision >/dev/null
	cargo build --release --workspace --bin outboxd --bin bench
	OUTBOXD_BIN=target/release/outboxd target/release/bench $(BENCH)

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
