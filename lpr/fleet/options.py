"""Flags of a service that belongs to a fleet. Imports no client library: only sharing needs one."""

import importlib.util
import math
import os
import socket
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from lpr.config import InputError

STORES = ("redis", "rediss", "unix")  # schemes of --draft-store
PASSWORD = "LPR_DRAFT_STORE_PASSWORD"  # environment variable with the password of the store, for a URL that has none
OBJECTS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""Schemes of --draft-snapshots that mean an object store; anything without one is a folder."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options of drafts shared between the replicas of a fleet."""

    draft_store: str | None = None
    """Redis or Valkey through which replicas share finished outputs as drafts: redis://[USER:PASSWORD@]HOST[:PORT][/DB],
    rediss:// for TLS (?ssl_ca_certs=FILE.pem), or unix://PATH. --share-drafts chooses whose. Default: $LPR_DRAFT_STORE;
    $LPR_DRAFT_STORE_PASSWORD is its password, which in a flag every user of the machine could read."""
    draft_store_length: int = 10_000
    """Outputs that the store keeps per tenant, approximately. The oldest go first."""
    draft_snapshots: str | None = None
    """Folder or s3://BUCKET/PREFIX (also gs:// and az://) for snapshots of shared drafts, with which a new replica
    starts warm. Credentials of object stores come from their usual environment variables."""
    draft_snapshot_every: float = 300.0
    """Seconds between two snapshots. One replica of the fleet writes each."""
    replica_name: str | None = None
    """Name of this replica in the header X-LPR-Replica. Default: $LPR_REPLICA_NAME, or the host's name and the port."""


def complete(options: FleetOptions) -> FleetOptions:
    """The options, with values from the environment where no flag is given."""
    return replace(
        options,
        draft_store=options.draft_store or os.environ.get("LPR_DRAFT_STORE") or None,
        replica_name=options.replica_name or os.environ.get("LPR_REPLICA_NAME") or None,
    )


def check(options: FleetOptions, share_drafts: str) -> None:
    """Raise InputError for invalid options. No message contains a URL, which may include a password."""
    if options.draft_store_length < 1:
        raise InputError(f"--draft-store-length {options.draft_store_length} must be at least 1")
    every = options.draft_snapshot_every
    if not 1 <= every < math.inf:
        raise InputError(f"--draft-snapshot-every {every:g} must be at least 1, in seconds")
    name = options.replica_name
    if name is not None and not (name.isascii() and name.isprintable() and 0 < len(name.strip()) == len(name) <= 200):
        raise InputError(f"--replica-name {name!r} must be printable ASCII of at most 200 characters")
    if options.draft_store is None:
        if options.draft_snapshots is not None:
            raise InputError("--draft-snapshots needs --draft-store, as a snapshot continues with its streams")
        return
    if share_drafts == "none":
        raise InputError("--draft-store shares drafts, and --share-drafts none forbids it")
    _check_store(options.draft_store)
    if options.draft_snapshots is not None and (scheme := scheme_of(options.draft_snapshots)):
        if scheme not in OBJECTS:
            raise InputError(f"--draft-snapshots: {scheme}:// is none of {', '.join(OBJECTS)}, and no folder")
        _need("obstore", "--draft-snapshots in an object store")


def default_name(port: int) -> str:
    return f"{socket.gethostname()}:{port}"


def scheme_of(place: str) -> str:
    """The scheme of a URL in lower case, "" for a path."""
    return place.partition("://")[0].lower() if "://" in place else ""


def _check_store(url: str) -> None:
    scheme = scheme_of(url)
    if scheme not in STORES:
        raise InputError(f"--draft-store must begin with one of {', '.join(f'{each}://' for each in STORES)}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as failure:
        raise InputError(f"--draft-store is no URL: {str(failure).partition(' as ')[0]}") from None
    if scheme == "unix":
        if not parts.path:
            raise InputError("--draft-store unix:// needs the path of a socket")
    elif not host or port == 0:
        raise InputError(f"--draft-store {scheme}:// needs a host, and a port from 1 to 65535 if it has one")
    elif parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise InputError("--draft-store: what follows the host is the number of a database")
    _need("redis", "--draft-store")


def _need(package: str, flag: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{flag} needs the package {package}: pip install 'lpr[fleet]'")
