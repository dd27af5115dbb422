"""The network interface of a node (``cluster.interface``) for Ray, gloo, NCCL, vLLM and verl."""

from __future__ import annotations

import os
import socket

import psutil
from omegaconf import DictConfig

from rl.cluster.ray import reachable
from rl.config.compose import ConfigError


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface of this machine.

    Raises:
        ConfigError: there is no such interface, it is down, or it has no address. The line names those that have one.
    """
    found = {
        interface: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for interface, entries in psutil.net_if_addrs().items()
    }
    here = ", ".join(f"{interface} ({given[0]})" for interface, given in sorted(found.items()) if given)
    if name not in found:
        raise ConfigError(f"cluster.interface: there is no {name}; here are {here}")
    if not psutil.net_if_stats()[name].isup:
        raise ConfigError(f"cluster.interface: {name} is down; here are {here}")
    if not found[name]:
        raise ConfigError(f"cluster.interface: {name} has no IPv4 address; here are {here}")
    return found[name][0]


def node_address(config: DictConfig, seen: str) -> str:
    """Return this node's address for Ray, from which verl takes its master's.

    ``seen``: this node's address in its connection to another node, which is used if ``cluster.interface`` is not set.
    Raises ConfigError.
    """
    return interface_address(config.cluster.interface) if config.cluster.interface else reachable(seen)


def use_interface(config: DictConfig) -> None:
    """Set the environment that makes gloo, NCCL and vLLM use the config's interface and adapters. Raises ConfigError.

    Ray's processes get it from this one. What the config leaves out stays as it is.
    """
    if name := config.cluster.interface:
        # NCCL takes a name for a prefix (ib1 for ib10 too) unless it begins with "=".
        os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        os.environ["VLLM_HOST_IP"] = interface_address(name)
    if adapters := config.cluster.ib_hca:
        os.environ["NCCL_IB_HCA"] = adapters
