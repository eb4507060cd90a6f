# The image of Dockerfile, with the ssh by which the launcher of an MPIJob starts workers in other pods.
#     docker build -t distdl_jax:ssh -f tools/containers/kubernetes.Dockerfile .
ARG BASE=distdl_jax:latest
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n' >/etc/ssh/ssh_config.d/mpi.conf \
    && printf 'StrictModes no\n' >/etc/ssh/sshd_config.d/mpi.conf
