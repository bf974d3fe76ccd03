# The server on a CPU, not as root. The model is mounted at /model, or copied there by an image built on this one:
#   docker build -t stretto .
#   docker run --read-only --tmpfs /tmp -p 127.0.0.1:8080:8080 -v $PWD/reviews-model:/model:ro stretto
# Inside, it listens on all addresses; publish the port on 127.0.0.1 only, or add --api-key-file.
FROM python:3.11-slim

RUN useradd --create-home --uid 10001 stretto
WORKDIR /app
COPY pyproject.toml requirements.txt constraints.txt README.md LICENSE ./
COPY src src
# pip's usual torch brings several GB for GPUs. To get the CPU build, name an index that has it:
#   docker build --build-arg TORCH_OPTIONS="--index-url ADDRESS-OF-CPU-BUILDS" -t stretto .
ARG TORCH_OPTIONS=""
RUN pip install --no-cache-dir $TORCH_OPTIONS torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt ".[serve]"

USER stretto
ENV HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
EXPOSE 8080
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health', timeout=3)"]
ENTRYPOINT ["stretto", "serve"]
CMD ["/model", "--host", "0.0.0.0"]
