# The server, in an image for every CPU:
#   docker build -t pyllama-mtp . && docker run -p 8080:8080 -v /models:/models pyllama-mtp -m /models/model.gguf
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ git
COPY . /source
RUN pip wheel -w /wheels '/source[serve,hub]' -C cmake.define.PYLLAMA_CPU_ALL=ON

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -r /var/lib/apt/lists
RUN --mount=from=build,source=/wheels,target=/wheels pip install --no-index -f /wheels 'pyllama-mtp[serve,hub]'
RUN useradd -m server
USER server
WORKDIR /home/server
EXPOSE 8080
ENTRYPOINT ["pyllama-mtp", "serve", "--host", "0.0.0.0"]
