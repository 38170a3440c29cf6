# agentrl as a gateway. Build from the root of the repository:
#   docker build -t REGISTRY/agentrl-gateway:1 -f deploy/kubernetes/gateway.Dockerfile .
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
      '/src[serve,kubernetes,postgres]' \
 && rm -rf /src
ENTRYPOINT ["agentrl"]
