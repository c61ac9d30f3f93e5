# gpuhub/torch: torch and NVIDIA's libraries for it, and nothing else, in the virtual environment of all images. It is by
# far the largest layer, and changes with `[images] torch` and Debian only. Like all builds, this one has no network and
# needs no BuildKit: wheels come with the context.
ARG PARENT=gpuhub/base:latest

FROM ${PARENT} AS build
# Found again by this label, so that the stage's wheels do not stay on the disk.
LABEL gpuhub.stage=build
COPY tidy.py /tmp/build/
COPY pip/ /tmp/build/pip/
COPY wheels/ /tmp/build/wheels/
# --no-deps: the packages that torch imports change more often, and are in gpuhub/science, where `pip check` proves that
# none is missing.
# System site packages are visible only because Python then also lets users install into ~/.local (`pip install --user`);
# the image's own packages come first on the path, so that nobody can break their notebook server that way.
RUN python3 -m venv --without-pip --system-site-packages /opt/gpuhub \
    && /opt/gpuhub/bin/python "$(echo /tmp/build/pip/pip-*.whl)/pip" install --no-index --no-deps --no-compile \
        --no-cache-dir --progress-bar off /tmp/build/wheels/*.whl \
    && /opt/gpuhub/bin/python /tmp/build/tidy.py /opt/gpuhub

FROM ${PARENT}
COPY --from=build /opt/gpuhub /opt/gpuhub
ENV PATH=/opt/gpuhub/bin:/usr/local/bin:/usr/bin:/bin
