# The versions that ran on a GPU (docs/features.md), for the losses and the trainer:
#     docker build -t fastrl .
#     docker run --gpus all -v "$PWD:/work" fastrl train config.toml
FROM python:3.12-slim-bookworm

# The C++ backend, and Triton for what starts its kernels, compile at their first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The wheels of torch bring CUDA 13.0 and Triton.
RUN pip install --no-cache-dir torch==2.11.0 triton==3.6.0 --index-url https://download.pytorch.org/whl/cu130

WORKDIR /fastrl
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY csrc csrc
COPY kernels kernels
COPY fastrl fastrl

# The other versions are those of constraints.txt, but for the ones that this torch and this transformers do not take.
RUN sed -E '/^(torch|triton|transformers|huggingface_hub|setuptools)==/d' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt transformers==5.17.0 '.[train,lora,datasets,math]'

WORKDIR /work
ENTRYPOINT ["fastrl"]
