"""Keys of jobs: a job's containers show with one that they belong to it, for as long as it runs.

A key is the job's id and its authentication code (HMAC-SHA256) by a secret of the head node. The store keeps none.
"""

from __future__ import annotations

import hashlib
import hmac

#: Scheme of the `Authorization` header.
SCHEME = "Job"


def build_key(secret: str, job_id: str) -> str:
    """Return the key of a job."""
    return f"{job_id}.{_authenticate(secret, job_id)}"


def find_job_id(secret: str, key: str) -> str | None:
    """Return the id of the job whose key this is; None for anything else."""
    job_id, _, code = key.partition(".")
    is_right = hmac.compare_digest(code.encode(), _authenticate(secret, job_id).encode())
    return job_id if is_right else None


def _authenticate(secret: str, job_id: str) -> str:
    return hmac.new(secret.encode(), b"job:" + job_id.encode(), hashlib.sha256).hexdigest()
