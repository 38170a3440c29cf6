# agentrl as a gateway. Build from the root of the repository:
#   docker build -t REGISTRY/agentrl-gateway:1 -f deploy/kubernetes/gateway.Dockerfile .
# It runs as a user of its own, with /state as its home; everything else may be read-only.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
      '/src[serve,kubernetes,postgres,clock]' \
 && rm -rf /src \
 && mkdir -m 0755 /state && chown 10001:10001 /state
ENV HOME=/state PYTHONUNBUFFERED=1
WORKDIR /state
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["agentrl"]
