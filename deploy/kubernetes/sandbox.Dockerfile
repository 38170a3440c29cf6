# The image under sandboxes whose environment folder brings only files: bash, Python >= 3.8 and what agents use.
#   docker build -t REGISTRY/agentrl-sandbox:1 -f deploy/kubernetes/sandbox.Dockerfile deploy/kubernetes
#   docker push REGISTRY/agentrl-sandbox:1          (kind: kind load docker-image …; minikube: minikube image load …)
#   export AGENTRL_KUBERNETES_IMAGE=REGISTRY/agentrl-sandbox:1
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends bash coreutils diffutils findutils git grep gzip less make patch \
      procps python3 sed tar tree util-linux \
 && rm -rf /var/lib/apt/lists/*
