"""The doctor's look at settings that do not go together, at secrets, and at the run's own folder."""

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from eaglefeed.access import check_listen, is_loopback
from eaglefeed.cli.common import access_token, is_with_producers
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, warn
from eaglefeed.queue.address import address_of, has_password, read_password

__all__ = ["examine_settings"]

_RENEWALS = 3
"""A lease is renewed so many times in its visibility timeout."""


def examine_settings(settings: Settings) -> Iterator[Finding]:
    """Look at the settings of this process; a section's own rules were checked when they were read."""
    yield from look("settings.secrets", partial(_secrets, settings))
    yield from look("settings.together", partial(_together, settings))
    yield from look("settings.run_dir", partial(_run_dir, settings.run_dir))


def _secrets(settings: Settings) -> Iterator[Said]:
    access_token(settings)
    if settings.queue.password_file is not None:
        read_password(settings.queue.password_file)
    files = [file for file in (settings.queue.password_file, settings.access.token_file) if file is not None]
    for file in files:
        mode = file.stat().st_mode
        if mode & stat.S_IROTH:
            yield warn(f"{file} can be read by every user ({stat.filemode(mode)})", f"chmod o-r {file}")
    token = "a token" if settings.access.token or settings.access.token_file else "no token for what listens"
    yield ok(f"{token}; every file of secrets can be read")


def _run_dir(folder: Path) -> Iterator[Said]:
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if os.access(place, os.R_OK | os.W_OK | os.X_OK):
        yield ok(f"{folder} can be written to")
    else:
        yield fail(f"{place} cannot be written to by uid {os.geteuid()}", "pass run.dir=FOLDER, or mend its owner")


def _together(settings: Settings) -> Iterator[Said]:
    said = [each for rule in _RULES for each in rule(settings)]
    yield from said or [ok("nothing that does not go together")]


def _leases(settings: Settings) -> Iterator[Said]:
    queue = settings.queue
    if queue.stall_timeout_s < queue.visibility_timeout_s / _RENEWALS:
        what = f"queue.stall_timeout_s={queue.stall_timeout_s:g} ends before the first renewal of a lease"
        yield fail(what, f"set it above queue.visibility_timeout_s={queue.visibility_timeout_s:g}")
    if queue.max_lease_age_s < queue.visibility_timeout_s:
        what = f"queue.max_lease_age_s={queue.max_lease_age_s:g} is below queue.visibility_timeout_s"
        yield warn(what, f"set it well above {queue.visibility_timeout_s:g}: a lease is never renewed so")


def _groups(settings: Settings) -> Iterator[Said]:
    group, groups = settings.train.group, settings.queue.groups
    if group not in groups:
        fix = f"see that the first feed of the run names it: eaglefeed feed 'queue.groups={','.join((*groups, group))}'"
        yield warn(f"train.group={group} is not one of queue.groups={','.join(groups)} here", fix)


def _backends(settings: Settings) -> Iterator[Said]:
    train, target = settings.train, settings.target
    if train.target_backend == "remote" and not train.remote_urls:
        yield fail("train.target_backend=remote without train.remote_urls", "pass --remote-urls http://HOST:PORT")
    if target.engine == "hf" and target.tp_size > 1:
        yield fail(f"target.engine=hf runs on one device, target.tp_size={target.tp_size}", "use vllm or sglang")
    if target.engine_url and target.engine != "vllm":
        yield fail(f"target.engine_url is of vllm, target.engine={target.engine}", "set target.engine=vllm")


def _retained(settings: Settings) -> Iterator[Said]:
    if settings.train.retain and is_with_producers(settings):
        fix = "leave train.retain out, or produce into another kind of store"
        yield fail("train.retain=true keeps samples that die with their producer (nccl://)", fix)


def _reports(settings: Settings) -> Iterator[Said]:
    for name in settings.train.report_to:
        if find_spec(name) is None:
            yield fail(f"train.report_to={name} is not installed", "pip install 'eaglefeed[report]'")


def _planes(settings: Settings) -> Iterator[Said]:
    devices = {"store.data_plane": settings.target.device, "train.remote_data_plane": settings.train.device}
    planes = {
        "store.data_plane": settings.store.data_plane,
        "train.remote_data_plane": settings.train.remote_data_plane,
    }
    for name, plane in planes.items():
        if plane == "nccl" and not devices[name].startswith("cuda"):
            yield fail(f"{name}=nccl moves tensors between GPUs, its device is {devices[name]}", f"set {name}=auto")


def _listeners(settings: Settings) -> Iterator[Said]:
    hosts = {"serve.host": settings.serve.host}
    if settings.metrics.port is not None:
        hosts["metrics.host"] = settings.metrics.host
    if is_with_producers(settings) and (host := urlsplit(settings.store_uri).hostname):
        hosts["store.uri"] = host
    try:
        token = access_token(settings)
    except ConfigError:
        return  # settings.secrets tells it
    for name, host in hosts.items():
        if not token and not _is_local(host):
            yield fail(f"{name}: {host} would listen beyond this machine without a token", "set access.token_file")


def _server(settings: Settings) -> Iterator[Said]:
    if not settings.redis_url:
        return
    address, queue = urlsplit(address_of(settings.redis_url)), settings.queue
    if address.scheme == "unix" or _is_local(address.hostname or "localhost"):
        return
    if not (queue.password or queue.password_file or has_password(settings.redis_url)):
        fix = "give its users passwords (deploy/users.acl.template), and set queue.password_file"
        yield warn("the queue is on another machine, and no password is set", fix)
    elif address.scheme == "redis":
        yield warn("the queue's password and items travel in the clear", "use rediss:// beyond a network you trust")
    if settings.store_uri.startswith("shm://"):
        fix = "use file:///folder that all machines mount, s3:// or nccl://"
        yield warn("the queue is on another machine, and shm:// is seen by this one alone", fix)
    if is_with_producers(settings) and is_loopback(urlsplit(settings.store_uri).hostname or ""):
        fix = "pass --store nccl://ADDRESS:PORT with an address that all trainers reach"
        yield warn("the queue is on another machine, and trainers there would look for samples on their own", fix)


def _is_local(host: str) -> bool:
    try:
        check_listen(host, "")
    except ConfigError:
        return False
    return True


_RULES: tuple[Callable[[Settings], Iterator[Said]], ...] = (
    _leases,
    _groups,
    _backends,
    _retained,
    _reports,
    _planes,
    _listeners,
    _server,
)
