# Server, node and command line of Gangline: `docker build --tag gangline .`
# deploy/compose.yaml runs them with PostgreSQL.
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=artifacts,codings,importers,math,mcp,otel,parquet,postgres,search,tokenizer
COPY . /source
RUN python -m venv /opt/gangline \
 && pip install --no-cache-dir --require-hashes --requirement /source/requirements/uv.txt \
 && uv pip install --no-cache --compile-bytecode --python /opt/gangline/bin/python \
    --constraint /source/requirements/tested.txt "/source[${EXTRAS}]"

FROM ${PYTHON_IMAGE}
# bubblewrap walls off agents, ripgrep searches for them.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends --yes bubblewrap git ripgrep \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home gangline \
 && install --directory --owner gangline --group gangline /data
COPY --from=build /opt/gangline /opt/gangline
ENV PATH=/opt/gangline/bin:$PATH GANGLINE_DATA=/data GANGLINE_LOG_FORMAT=json
USER 10001
WORKDIR /data
VOLUME /data
ENTRYPOINT ["gangline"]
CMD ["--help"]
