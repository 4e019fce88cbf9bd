# Debian's Prometheus, started as the image that compose.yaml names starts it.
ARG BASE
FROM ${BASE}
COPY prometheus /bin/prometheus
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
