FROM rust:1-slim-trixie AS build
RUN apt-get update && apt-get install -y --no-install-recommends pkg-config libssl-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p outboxd

FROM debian:trixie-slim
RUN apt-get update && apt-get install -y --no-install-recommends libssl3t64 ca-certificates \
 && rm -rf /var/lib/apt/lists/* && useradd --system --uid 9470 --no-create-home outboxd
COPY --from=build /src/target/release/outboxd /usr/local/bin/outboxd
USER 9470
EXPOSE 9470
ENTRYPOINT ["/usr/local/bin/outboxd"]
CMD ["run"]
