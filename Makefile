# demo: the first try.  test: all tests, on real servers.  bench: speed.  lint: formatting, clippy, docs.
.PHONY: demo test bench lint prepare

# The linker is a matter of build time only; a machine that sets its own flags keeps them.
ifeq ($(shell grep -qs rustflags $(HOME)/.cargo/config.toml && echo own),)
ifneq ($(shell command -v mold),)
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS ?= -Clink-arg=-fuse-ld=mold
endif
endif

demo: prepare
	cargo build -p outboxd
	scripts/demo

test: prepare
	scripts/services provision >/dev/null
	cargo build -p outboxd
	scripts/test-summary cargo test --workspace --no-fail-fast

bench: prepare
	scripts/services provision >/dev/null
	cargo build --release -p outboxd -p outbox-e2e
	target/release/bench

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

prepare:
	@scripts/prepare
