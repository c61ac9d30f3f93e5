# One layer with the packages of a lock file, on top of another image: gpuhub/science, gpuhub/lab and gpuhub/llm-packages
# are built from this file.
ARG PARENT

FROM ${PARENT} AS build
LABEL gpuhub.stage=build
COPY requirements.lock tidy.py /tmp/build/
COPY pip/ /tmp/build/pip/
COPY wheels/ /tmp/build/wheels/
# --no-deps: with the locks below it the lock is complete, and leaves out what is dropped on purpose (see lab.in);
# `pip check` proves it.
RUN pip="/opt/gpuhub/bin/python $(echo /tmp/build/pip/pip-*.whl)/pip" \
    && $pip install --prefix=/tmp/added --no-index --find-links=/tmp/build/wheels --no-deps --no-compile --no-cache-dir \
        --progress-bar off --no-warn-script-location --require-hashes --requirement /tmp/build/requirements.lock \
    && PYTHONPATH="$(echo /tmp/added/lib/python3*/site-packages)" $pip check \
    && /opt/gpuhub/bin/python /tmp/build/tidy.py /tmp/added

FROM ${PARENT}
COPY --from=build /tmp/added/ /opt/gpuhub/
