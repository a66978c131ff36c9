"""Ports to meet at are free, and are not those that connections get by themselves."""

from __future__ import annotations

import socket
from pathlib import Path

from megarl.ports import free_port


def test_a_port_can_be_listened_on_and_is_never_given_to_a_connection() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert all(1024 <= port < first for port in ports)
    with socket.socket() as listening:
        listening.bind(("", ports.pop()))
        listening.listen()


def test_a_port_in_use_is_not_given(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        number = taken.getsockname()[1]
        offered = iter([number, number, number - 1])
        monkeypatch.setattr("random.SystemRandom.randrange", lambda *_: next(offered))
        assert free_port() == number - 1
