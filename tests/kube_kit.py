"""This module starts a Kubernetes cluster of a test's own: etcd, an API server, a scheduler, containerd and a kubelet.

Everything is in one directory, and in a mount and a process namespace of its own: when its first process ends, so do
all others, and all mounts. Pods have a loopback and nothing else. `KUBE_BIN` names the directory of the servers, which
packaging/kubernetes/README.md says how to build.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import ssl
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.files import remove_tree

PROGRAMS = (
    "etcd kube-apiserver kube-scheduler kubelet containerd ctr runc unshare nsenter openssl cc /usr/lib/cni/loopback"
)
NAMESPACE, NODE = "boxes", "127.0.0.1"
"""Where boxes are, and the name of the only node, which is also where the API server finds its kubelet."""
POD_PROCESSES = 512
"""How many processes a pod may have."""
API_ADDRESS = "127.10.0.1"
"""Where pods are told that the API server is. Nothing leads from there to it."""
# All rights that a trainer needs.
ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
]

# What a kubelet sets for the whole machine; here it sets files of its own.
_TUNED = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1}
_TUNED |= {"kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000}
# The address is never used: the plugin makes no interface, but a runtime wants to be told of one.
_NETWORK = """#!/bin/sh
cat >/dev/null
case $CNI_COMMAND in
ADD) echo '{"cniVersion": "0.4.0", "interfaces": [{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}],
    "ips": [{"version": "4", "interface": 0, "address": "192.0.2.9/24"}]}' ;;
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.4.0"]}' ;;
esac
"""
_CONTAINERD = """version = 2
root = "{here}/images"
state = "{here}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs"]
[grpc]
address = "{here}/c.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{here}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
disable_apparmor = true
restrict_oom_score_adj = true
disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{here}/plugins"
conf_dir = "{here}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
# The command lines of the servers. One key and its certificate are all servers' and clients'.
_SERVERS = """
etcd --data-dir=etcd --unsafe-no-fsync --name=node --initial-cluster=node=http://127.0.0.1:{peer}
    --listen-client-urls=http://127.0.0.1:{etcd} --advertise-client-urls=http://127.0.0.1:{etcd}
    --listen-peer-urls=http://127.0.0.1:{peer} --initial-advertise-peer-urls=http://127.0.0.1:{peer}
kube-apiserver --etcd-servers=http://127.0.0.1:{etcd} --bind-address=127.0.0.1 --secure-port={api}
    --tls-cert-file=crt --tls-private-key-file=key --anonymous-auth=false --token-auth-file=tokens
    --authorization-mode=RBAC --service-cluster-ip-range=127.10.0.0/24 --endpoint-reconciler-type=none
    --service-account-issuer=https://test --service-account-signing-key-file=key --service-account-key-file=key
    --kubelet-client-certificate=crt --kubelet-client-key=key --kubelet-preferred-address-types=Hostname
    --disable-admission-plugins=TaintNodesByCondition
kube-scheduler --kubeconfig=admin --leader-elect=false --port=0 --bind-address=127.0.0.1 --secure-port={scheduler}
    --cert-dir=scheduler
containerd --config=containerd
kubelet --config=kubelet.yaml --kubeconfig=admin --root-dir={here}/kubelet --cert-dir={here}/kubelet
    --hostname-override=127.0.0.1 --container-runtime=remote --container-runtime-endpoint=unix://{here}/c.sock
    --seccomp-profile-root={here}/seccomp
"""


def program(name: str) -> str | None:
    """Return where a program is, None if it is not there."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("KUBE_BIN", ""), os.environ["PATH"], "/usr/sbin"]))


class Cluster:
    """A cluster of one node. config: a kubeconfig of a user with the rights of `ROLE` in `NAMESPACE`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.config, self.group = directory, directory / "config", f"rl-{directory.name}"
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
            ports = [one.getsockname()[1] for one in sockets]
        self.ports = dict(zip(("etcd", "peer", "api", "kubelet", "scheduler"), ports, strict=True))
        for name in ("cni", "kubelet", "log", "log-pods", "plugins", "sockets", "tuned", "upper", "work"):
            (directory / name).mkdir()
        new = "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=test -keyout key -out crt -addext"
        subprocess.run([*new.split(), "subjectAltName=IP:127.0.0.1"], cwd=directory, check=True, capture_output=True)
        (directory / "tokens").write_text('admin-token,admin,1,"system:masters"\ntrainer-token,trainer,2\n')
        self.kubeconfig("admin", "admin-token")
        self.kubeconfig("config", "trainer-token")
        self._write()

    def start(self) -> None:
        """Start everything, and wait until the node takes pods."""
        for top in Path("/sys/fs/cgroup").iterdir():
            if top.name not in ("unified", "net_cls", "net_prio", "perf_event"):
                (top / self.group).mkdir()
            for file in ("cpuset.cpus", "cpuset.mems") if top.name == "cpuset" else ():
                (top / self.group / file).write_text((top / file).read_text())
        command = "unshare --mount --pid --fork --mount-proc --kill-child bash run"
        with open(self.directory / "log" / "run", "ab") as log:
            self.process = subprocess.Popen(
                command.split(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait("the API server", lambda: self.api("readyz") == "ok")
        self._admit()
        self._wait("the node", lambda: '"type":"Ready","status":"True"' in self.api("api/v1/nodes"))

    def stop(self) -> None:
        """End everything, and remove what it has left outside of the directory."""
        self.process.kill()
        self.process.wait()
        for top in Path("/sys/fs/cgroup").iterdir():
            for _ in range(100):  # the kernel takes a moment to end the processes of a namespace
                for place, _, _ in os.walk(top / self.group, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(place)
                if not (top / self.group).exists():
                    break
                time.sleep(0.05)

    def load(self, image: str) -> None:
        """Give the node an image of the machine's Docker engine."""
        with open(self.directory / "image.tar", "wb") as file:
            file.writelines(get_engine().client.get_image(image))
        # In the cluster's namespaces, where its mounts are.
        child = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
        command = f"nsenter --target={child} --mount --pid ctr --address={self.directory}/c.sock --namespace=k8s.io"
        load = [*command.split(), "images", "import", f"{self.directory}/image.tar"]
        subprocess.run(load, check=True, capture_output=True)
        (self.directory / "image.tar").unlink()

    def kubeconfig(self, name: str, token: str, port: int | None = None) -> str:
        """Write a file that says how to reach the cluster with a token; return its path."""
        certificate = base64.b64encode((self.directory / "crt").read_bytes()).decode()
        server = {"server": f"https://127.0.0.1:{port or self.ports['api']}", "certificate-authority-data": certificate}
        named = {"clusters": ("cluster", server), "users": ("user", {"token": token})}
        named["contexts"] = ("context", {"cluster": "test", "user": "test"})
        config = {key: [{"name": "test", kind: value}] for key, (kind, value) in named.items()}
        path = self.directory / name
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "test", **config}))
        return str(path)

    def pods(self, **options: Any) -> Any:
        """Return how boxes are made here."""
        from kubernetes_boxes.box import Pods

        how = {"kubeconfig": str(self.config), "requests": {"cpu": "20m", "memory": "64Mi"}, "boot_s": 120, **options}
        return Pods(NAMESPACE, **how)

    def names(self) -> list[str]:
        """Return the names of all boxes."""
        found = json.loads(self.api(f"api/v1/namespaces/{NAMESPACE}/pods"))["items"]
        return [one["metadata"]["name"] for one in found if "deletionTimestamp" not in one["metadata"]]

    def api(self, path: str, body: dict | None = None, method: str | None = None) -> str:
        """Ask the API server something as its administrator. Raises OSError."""
        context = ssl.create_default_context(cafile=str(self.directory / "crt"))
        data = None if body is None else json.dumps(body).encode()
        heads = {"Authorization": "Bearer admin-token", "Content-Type": "application/json"}
        request = urllib.request.Request(f"https://127.0.0.1:{self.ports['api']}/{path}", data, heads, method=method)
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.read().decode()

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while True:
            said = ""
            try:
                if ready():
                    return
            except OSError as error:
                said = str(error)
            if self.process.poll() is not None or time.monotonic() > end:
                logs = "".join(f"\n{log.name}:\n{log.read_text()[-1500:]}" for log in self.directory.glob("log/*"))
                raise RuntimeError(f"{what} does not get ready: {said}{logs}")
            time.sleep(0.2)

    def _admit(self) -> None:
        """Make the boxes' namespace, and give the trainer its rights there."""
        of = "rbac.authorization.k8s.io"
        bound = {"roleRef": {"apiGroup": of, "kind": "Role", "name": "boxes"}}
        bound["subjects"] = [{"apiGroup": of, "kind": "User", "name": "trainer"}]  # type: ignore[assignment]
        self.api("api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.api(f"api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
        for kind, what in ("roles", {"rules": ROLE}), ("rolebindings", bound):
            self.api(f"apis/{of}/v1/namespaces/{NAMESPACE}/{kind}", {"metadata": {"name": "boxes"}, **what})

    def _write(self) -> None:
        """Write what the servers are configured by, and the script that starts them."""
        here = self.directory
        (here / "plugins" / "none").write_text(_NETWORK)
        (here / "plugins" / "none").chmod(0o755)
        (here / "plugins" / "loopback").symlink_to("/usr/lib/cni/loopback")
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}
        (here / "cni" / "1.conflist").write_text(json.dumps(network))
        (here / "containerd").write_text(_CONTAINERD.format(here=here))
        (here / "kubelet.yaml").write_text(yaml.safe_dump({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": NODE, "port": self.ports["kubelet"], "healthzPort": 0, "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False},
                               "x509": {"clientCAFile": f"{here}/crt"}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.group}", "failSwapOn": False,
            "makeIPTablesUtilChains": False, "hairpinMode": "none", "volumePluginDir": f"{here}/volume-plugins",
            "oomScoreAdj": 0, "evictionHard": {"nodefs.available": "1%"}, "imageGCHighThresholdPercent": 100,
            "resolvConf": "", "nodeStatusUpdateFrequency": "10s", "podPidsLimit": POD_PROCESSES,
        }))  # fmt: skip
        for name, value in _TUNED.items():
            (here / "tuned" / name.replace("/", "-")).write_text(f"{value}\n")
        lines = [f"set -eu; export PATH={os.environ.get('KUBE_BIN', '')}:$PATH:/usr/sbin"]
        lines += [f"mount --bind tuned/{name.replace('/', '-')} /proc/sys/{name}" for name in _TUNED]
        # Places that are the same in every kubelet and containerd.
        lines += ["mount --bind log-pods /var/log", "mount --bind sockets /run"]
        lines += ["mount -t overlay -o lowerdir=/var/lib,upperdir=upper,workdir=work overlay /var/lib"]
        for words in _SERVERS.format(here=here, **self.ports).replace("\n    ", " ").split("\n")[1:-1]:
            name = words.split()[0]
            if name == "kubelet":
                lines.append(
                    "until ctr -a c.sock -n k8s.io images import pause.tar >log/pause 2>&1; do sleep 0.1; done"
                )
            lines.append(f"{words} >log/{name} 2>&1 &")
        (here / "run").write_text("\n".join([*lines, "wait -n"]) + "\n")
        self._pause()

    def _pause(self) -> None:
        """Write an image with one program, which waits, as `docker save` does."""
        here = self.directory
        (here / "pause.c").write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
        build = "cc -static -o pause pause.c && tar -cf layer.tar pause && sha256sum <layer.tar"
        digest = subprocess.run(["sh", "-c", build], cwd=here, check=True, capture_output=True, text=True).stdout[:64]
        config = {"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/pause"]}}
        config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
        manifest = [{"Config": "config.json", "RepoTags": ["localhost/pause:1"], "Layers": ["layer.tar"]}]
        with tarfile.open(here / "pause.tar", "w") as tar:
            for name, content in ("manifest.json", manifest), ("config.json", config):
                (here / name).write_text(json.dumps(content))
                tar.add(here / name, name)
            tar.add(here / "layer.tar", "layer.tar")


@contextlib.contextmanager
def running(*images: str) -> Iterator[Cluster]:
    """A cluster with these images, which is ended, and whose directory is removed, at the end."""
    missing = [name for name in PROGRAMS.split() if program(name) is None]
    missing += ["the client (pip install kubernetes)"] * (importlib.util.find_spec("kubernetes") is None)
    if missing or os.getuid() != 0:
        pytest.skip(f"a cluster of a test's own needs root, and {', '.join(missing)}: packaging/kubernetes/README.md")
    directory = Path(tempfile.mkdtemp(prefix="kube-"))
    cluster = Cluster(directory)
    try:
        cluster.start()
        for image in images:
            cluster.load(image)
        yield cluster
    finally:
        cluster.stop()
        remove_tree(directory)  # boxes may have left deep trees
