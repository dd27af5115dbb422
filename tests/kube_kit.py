"""This module starts a Kubernetes cluster of a test's own: etcd, an API server, a scheduler, containerd and a kubelet.

Everything is in one directory, and in a mount and a process namespace of its own: when its first process ends, so do
all others, and all mounts. Pods have a loopback and nothing else. `KUBE_BIN` names the directory of the servers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import io
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.files import remove_tree
from tests.lacks import lacks

PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-scheduler",
    "kubelet",
    "containerd",
    "ctr",
    "runc",
    "unshare",
    "openssl",
    "cc",
)
NAMESPACE, NODE = "boxes", "127.0.0.1"
"""Where boxes are, and the name of the only node, which is also where the API server finds its kubelet."""

_CONTROLLERS = ("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "hugetlb", "memory", "pids", "systemd")
# What a kubelet sets for the whole machine; here it sets files of its own.
_TUNED = {"vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1}
_TUNED |= {"kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000}
_PAUSE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
# The address is never used: the plugin makes no interface, but a runtime wants to be told of one.
_NETWORK = """#!/bin/sh
cat >/dev/null
case $CNI_COMMAND in
ADD) echo '{"cniVersion": "0.4.0", "interfaces": [{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}],
    "ips": [{"version": "4", "interface": 0, "address": "192.0.2.9/24"}]}' ;;
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.4.0"]}' ;;
esac
"""
# The trainer's rights: all that boxes need.
ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]


def program(name: str) -> str | None:
    """Return where a program is, None if it is not there."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("KUBE_BIN", ""), os.environ["PATH"], "/usr/sbin"]))


class Cluster:
    """A cluster of one node. config: a kubeconfig of a user with the rights of `ROLE` in `NAMESPACE`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.config = directory, directory / "config"
        self.group = f"rl-{directory.name}"
        self.ports = dict(zip(("etcd", "peer", "api", "kubelet", "scheduler"), _free(5), strict=True))
        for name in (
            "etcd",
            "kubelet",
            "cni",
            "plugins",
            "tuned",
            "keys",
            "log",
            "log-pods",
            "sockets",
            "upper",
            "work",
        ):
            (directory / name).mkdir()
        self._keys()
        for user, file in (("admin", "admin"), ("trainer", "config")):
            self._kubeconfig(user, directory / file)
        self._write()

    def start(self) -> None:
        """Start everything, and wait until the node takes pods."""
        for name in _CONTROLLERS:
            if (top := Path("/sys/fs/cgroup", name)).is_dir():
                (top / self.group).mkdir()
                for file in ("cpuset.cpus", "cpuset.mems") if name == "cpuset" else ():
                    (top / self.group / file).write_text((top / file).read_text())
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "run"]
        with open(self.directory / "log" / "run", "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
        archive = self.directory / "image.tar"
        with open(archive, "wb") as file:
            file.writelines(get_engine().client.get_image(image))
        self._ctr("images", "import", str(archive))
        archive.unlink()

    def pods(self) -> Any:
        """Return how boxes are made here."""
        from kubernetes_boxes.box import Pods

        return Pods(NAMESPACE, str(self.config), requests={"cpu": "20m", "memory": "64Mi"}, boot_s=120)

    def names(self) -> list[str]:
        """Return the names of all boxes."""
        found = json.loads(self.api(f"api/v1/namespaces/{NAMESPACE}/pods"))["items"]
        return [one["metadata"]["name"] for one in found if "deletionTimestamp" not in one["metadata"]]

    def images(self) -> str:
        """Return the names of the node's images."""
        return self._ctr("images", "list", "-q")

    def api(self, path: str, body: dict | None = None, method: str | None = None) -> str:
        """Ask the API server something as its administrator. Raises OSError."""
        context = ssl.create_default_context(cafile=str(self.directory / "keys" / "ca.crt"))
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://127.0.0.1:{self.ports['api']}/{path}", data, method=method)
        request.add_header("Authorization", "Bearer admin-token")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.read().decode()

    def _ctr(self, *words: str) -> str:
        command = [
            program("ctr") or "ctr",
            "--address",
            str(self.directory / "c.sock"),
            "--namespace",
            "k8s.io",
            *words,
        ]
        done = subprocess.run(self._inside(command), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _inside(self, command: list[str]) -> list[str]:
        """Return a command line that runs in the cluster's namespaces, where its mounts are."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return ["nsenter", f"--target={children[0]}", "--mount", "--pid", *command]

    def _wait(self, what: str, ready: object) -> None:
        end = time.monotonic() + 300
        while True:
            said = ""
            try:
                if ready():  # type: ignore[operator]
                    return
            except OSError as error:
                said = str(error)
            if self.process.poll() is not None or time.monotonic() > end:
                logs = {
                    file.name: file.read_text(errors="replace")[-1500:] for file in (self.directory / "log").iterdir()
                }
                raise RuntimeError(
                    f"{what} does not get ready: {said}\n" + "\n".join(f"{k}:\n{v}" for k, v in logs.items())
                )
            time.sleep(0.2)

    def _admit(self) -> None:
        """Make the boxes' namespace, and give the trainer its rights there."""
        group = "apis/rbac.authorization.k8s.io/v1/namespaces/boxes"
        with contextlib.suppress(OSError):
            self.api("api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.api(f"api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
        self.api(f"{group}/roles", {"metadata": {"name": "boxes"}, "rules": ROLE})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "boxes"}
        subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "trainer"}]
        self.api(f"{group}/rolebindings", {"metadata": {"name": "boxes"}, "roleRef": reference, "subjects": subjects})

    def _keys(self) -> None:
        keys = self.directory / "keys"

        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=keys, check=True, capture_output=True)

        new = ("-newkey", "rsa:2048", "-nodes", "-batch", "-days", "30")
        openssl("req", "-x509", *new, "-subj", "/CN=test", "-keyout", "ca.key", "-out", "ca.crt")
        (keys / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        for name in ("api", "client"):
            openssl("req", *new[:-2], "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "names"]
            openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)
        (keys / "tokens").write_text('admin-token,admin,1,"system:masters"\ntrainer-token,trainer,2\n')

    def _kubeconfig(self, user: str, path: Path) -> None:
        cluster = {"server": f"https://127.0.0.1:{self.ports['api']}"}
        cluster["certificate-authority-data"] = base64.b64encode((self.directory / "keys/ca.crt").read_bytes()).decode()
        context = {"cluster": "test", "user": user, "namespace": NAMESPACE}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "test"}
        config["clusters"] = [{"name": "test", "cluster": cluster}]  # type: ignore[assignment]
        config["users"] = [{"name": user, "user": {"token": f"{user}-token"}}]  # type: ignore[assignment]
        config["contexts"] = [{"name": "test", "context": context}]  # type: ignore[assignment]
        path.write_text(yaml.safe_dump(config))

    def _write(self) -> None:
        """Write what the programs are configured by, and the script that starts them."""
        here, ports = self.directory, self.ports
        (here / "plugins" / "none").write_text(_NETWORK)
        (here / "plugins" / "none").chmod(0o755)
        (here / "plugins" / "loopback").symlink_to("/usr/lib/cni/loopback")
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}
        (here / "cni" / "1.conflist").write_text(json.dumps(network))
        for name, value in _TUNED.items():
            (here / "tuned" / name.replace("/", "-")).write_text(f"{value}\n")
        cri = "io.containerd.grpc.v1.cri"
        (here / "containerd").write_text(f"""version = 2
root = "{here}/images"
state = "{here}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs"]
[grpc]
address = "{here}/c.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{here}/opt"
[plugins."{cri}"]
sandbox_image = "localhost/pause:1"
disable_apparmor = true
restrict_oom_score_adj = true
disable_hugetlb_controller = true
[plugins."{cri}".cni]
bin_dir = "{here}/plugins"
conf_dir = "{here}/cni"
[plugins."{cri}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")
        (here / "kubelet.yaml").write_text(yaml.safe_dump({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": NODE, "port": ports["kubelet"], "healthzPort": 0, "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False},
                               "x509": {"clientCAFile": f"{here}/keys/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.group}", "failSwapOn": False, "podPidsLimit": 512,
            "makeIPTablesUtilChains": False, "hairpinMode": "none", "volumePluginDir": f"{here}/volume-plugins",
            "oomScoreAdj": 0, "evictionHard": {"nodefs.available": "1%"}, "imageGCHighThresholdPercent": 100,
            "resolvConf": "", "syncFrequency": "10s", "nodeStatusUpdateFrequency": "10s",
        }))  # fmt: skip
        api, admin = f"https://127.0.0.1:{ports['api']}", f"{here}/admin"
        commands = {
            "etcd": [
                "--data-dir=etcd", f"--listen-client-urls=http://127.0.0.1:{ports['etcd']}", "--unsafe-no-fsync",
                f"--advertise-client-urls=http://127.0.0.1:{ports['etcd']}",
                f"--listen-peer-urls=http://127.0.0.1:{ports['peer']}", f"--name={NODE}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{ports['peer']}",
                f"--initial-cluster={NODE}=http://127.0.0.1:{ports['peer']}",
            ],
            "kube-apiserver": [
                f"--etcd-servers=http://127.0.0.1:{ports['etcd']}", f"--secure-port={ports['api']}",
                "--bind-address=127.0.0.1", "--cert-dir=keys", "--tls-cert-file=keys/api.crt",
                "--tls-private-key-file=keys/api.key", "--anonymous-auth=false", "--token-auth-file=keys/tokens",
                "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
                f"--service-account-issuer={api}", "--service-account-signing-key-file=keys/ca.key",
                "--service-account-key-file=keys/ca.key", "--kubelet-client-certificate=keys/client.crt",
                "--kubelet-client-key=keys/client.key", "--kubelet-preferred-address-types=Hostname",
                "--endpoint-reconciler-type=none", "--disable-admission-plugins=TaintNodesByCondition",
            ],
            "containerd": ["--config=containerd"],
            "kubelet": [
                "--config=kubelet.yaml", f"--kubeconfig={admin}", f"--root-dir={here}/kubelet", "--cert-dir=keys",
                f"--hostname-override={NODE}", "--container-runtime=remote",
                f"--container-runtime-endpoint=unix://{here}/c.sock", f"--seccomp-profile-root={here}/seccomp",
            ],
            "kube-scheduler": [
                f"--kubeconfig={admin}", "--leader-elect=false", "--port=0", "--bind-address=127.0.0.1",
                f"--secure-port={ports['scheduler']}", "--cert-dir=keys",
            ],
        }  # fmt: skip
        pause = f"{program('ctr')} --address c.sock --namespace k8s.io images import pause.tar"
        lines = [
            "set -eu",
            *(f"mount --bind tuned/{name.replace('/', '-')} /proc/sys/{name}" for name in _TUNED),
            # Places that are the same in every kubelet and containerd.
            "mount --bind log-pods /var/log && mount --bind sockets /run",
            "mount -t overlay -o lowerdir=/var/lib,upperdir=upper,workdir=work overlay /var/lib",
            *(f"PATH=$PATH:/usr/sbin {program(name)} {' '.join(words)} >log/{name} 2>&1 &"
              if name not in ("kubelet",) else
              f"until {pause} >log/pause 2>&1; do sleep 0.1; done\n"
              f"PATH=$PATH:/usr/sbin {program(name)} {' '.join(words)} >log/{name} 2>&1 &"
              for name, words in commands.items()),
            "wait -n",
        ]  # fmt: skip
        (here / "run").write_text("\n".join(lines) + "\n")
        (here / "pause.c").write_text(_PAUSE)
        subprocess.run(["cc", "-static", "-Os", "-s", "-o", "pause", "pause.c"], cwd=here, check=True)
        _archive(here / "pause.tar", "localhost/pause:1", {"pause": (here / "pause").read_bytes()}, ["/pause"])


def _free(count: int) -> list[int]:
    """Return free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _archive(path: Path, name: str, files: dict[str, bytes], command: list[str]) -> None:
    """Write an image with a few programs, as `docker save` does."""

    def packed(contents: dict[str, bytes], mode: int) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for inside, data in contents.items():
                member = tarfile.TarInfo(inside)
                member.size, member.mode = len(data), mode
                tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()

    layer = packed(files, 0o755)
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    config = {"architecture": "amd64", "os": "linux", "config": {"Entrypoint": command}, "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
    }
    path.write_bytes(packed(parts, 0o644))


@contextlib.contextmanager
def running(*images: str) -> Iterator[Cluster]:
    """A cluster with these images, which is ended, and whose directory is removed, at the end."""
    if lost := [name for name in PROGRAMS if program(name) is None]:
        lacks(f"a cluster needs {', '.join(lost)}")
    if importlib.util.find_spec("kubernetes") is None:
        lacks("the client: pip install kubernetes")
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
