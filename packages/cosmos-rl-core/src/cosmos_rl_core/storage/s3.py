"""Settings of S3, for datasets, checkpoints and all other URLs. From these variables where they are set:

    PROD_S3_CHECKPOINT_ACCESS_KEY_ID   PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY
    PROD_S3_CHECKPOINT_ENDPOINT_URL    PROD_S3_CHECKPOINT_REGION_NAME

and otherwise from those of the AWS command line. They go to the client and nowhere else: into no file, no log and no
message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.errors import UserError

PREFIX = "PROD_S3_CHECKPOINT_"
ACCESS_KEY_ID = f"{PREFIX}ACCESS_KEY_ID"
SECRET_ACCESS_KEY = f"{PREFIX}SECRET_ACCESS_KEY"
ENDPOINT_URL = f"{PREFIX}ENDPOINT_URL"
REGION_NAME = f"{PREFIX}REGION_NAME"


def s3_options(environ: Mapping[str, str] = os.environ, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Return the options of s3fs from the environment.

    Raises:
        UserError: one half of the key without the other.
    """
    key, secret = environ.get(ACCESS_KEY_ID), environ.get(SECRET_ACCESS_KEY)
    if bool(key) != bool(secret):
        present, missing = (ACCESS_KEY_ID, SECRET_ACCESS_KEY) if key else (SECRET_ACCESS_KEY, ACCESS_KEY_ID)
        raise UserError(f"{present} is set and {missing} is not; set both, or neither to use those of AWS")
    quick = min(timeout_s, 10.0)
    client = {"endpoint_url": environ.get(ENDPOINT_URL), "region_name": environ.get(REGION_NAME)}
    options: dict[str, Any] = {
        "client_kwargs": {name: value for name, value in client.items() if value},
        "config_kwargs": {  # s3fs has its own retries, with longer and longer waits; those of the client multiply them
            "connect_timeout": quick,
            "read_timeout": timeout_s,
            "retries": {"max_attempts": 0},
        },
        "use_listings_cache": False,
    }
    return options | {"key": key, "secret": secret} if key else options
