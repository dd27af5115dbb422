#!/usr/bin/python3 -I
"""This program stands in for `apptainer` where that cannot be installed: it notes how it was called, and plays it.

It takes the options of Apptainer 1.2 and SingularityCE 4.0, and ends at any other as the real program does. A box is
bubblewrap's, a .sif file is a tar archive of the image's root directory, and the registry is the directory registry/
beside this file. calls.jsonl gets the command lines, and a line whenever a box has ended. options.json says what the
program pretends to be unable to do. The system directories of images are the machine's own, so that an image needs only
mount points.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = {"--userns", "--containall", "--cleanenv", "--no-eval", "--net", "--no-home", "--writable", "--no-privs"}
VALUES = {"--network", "--no-mount", "--overlay", "--home", "--pwd", "--mount"}
VALUES |= {"--memory", "--memory-swap", "--cpus", "--pids-limit"}
CANNOT = json.loads((HERE / "options.json").read_text())


def fatal(text):
    print(f"FATAL:   {text}", file=sys.stderr)
    sys.exit(255)


def parse(argv, flags, values):
    options = []
    while argv and argv[0].startswith("-"):
        name, *argv = argv
        if name in flags:
            options.append((name, None))
        elif name in values and argv:
            options.append((name, argv.pop(0)))
        else:
            fatal(f"unknown flag: {name}")
    return options, argv


def pull(argv):
    _, (target, address) = parse(argv, {"--disable-cache"}, set())
    scheme, _, name = address.partition("://")
    source = HERE / "registry" / f"{name.replace('/', '_')}.tar"
    if scheme != "docker" or not source.exists():
        fatal(f"While making image from oci registry: reading manifest: no {address}")
    time.sleep(CANNOT.get("pull_s", 0))
    shutil.copy(source, target)


def build(argv):
    options, (target, source) = parse(argv, {"--sandbox", "--fix-perms"}, set())
    if ("--sandbox", None) in options:
        Path(target).mkdir()
        subprocess.run(["tar", "-xf", source, "-C", target], check=True)
    else:
        subprocess.run(["tar", "-cf", target, "-C", source, "."], check=True)


def unpacked(image):
    if image.is_dir():
        return image
    if not image.exists():
        fatal(f"could not open image {image}: no such file or directory")
    status = image.stat()
    key = hashlib.sha256(f"{image}{status.st_ino}{status.st_mtime_ns}".encode()).hexdigest()[:16]
    root = HERE / "unpacked" / key
    if not root.exists():
        new = root.with_name(f"{key}-{os.getpid()}")
        new.mkdir(parents=True)
        subprocess.run(["tar", "-xf", image, "-C", new], check=True)
        try:
            new.rename(root)
        except OSError:
            shutil.rmtree(new)
    return root


def execute(argv):
    options, (image, *program) = parse(argv, FLAGS, VALUES)
    given = dict(options)
    missing = {"--userns", "--containall", "--cleanenv", "--no-eval", "--net"} - given.keys()
    if missing or given.get("--network") != "none":
        fatal(f"a box that is not alone: {missing or given.get('--network')}")
    if "--memory" in given and CANNOT.get("limits"):
        fatal("rootless cgroups require a D-Bus session - check that XDG_RUNTIME_DIR is set")
    if "--overlay" in given and CANNOT.get("overlay"):
        fatal("only root user can use overlay images")
    if CANNOT.get("start"):
        fatal("container creation failed: user namespaces are disabled")
    root = unpacked(Path(image))
    writable = "--writable" in given
    if "--overlay" in given:
        upper = Path(given["--overlay"], "upper")
        if not upper.exists():
            new = upper.with_name(f"upper-{os.getpid()}")  # whoever is killed here leaves no half of it
            shutil.copytree(root, new, symlinks=True)
            new.rename(upper)
        root, writable = upper, True
    binds = [
        [field.partition("=")[2] for field in next(csv.reader([value]))] for key, value in options if key == "--mount"
    ]
    binds = [(source, inside, bool(rest)) for source, inside, *rest in (bind[1:] for bind in binds)]
    home = given.get("--home")
    if home:
        binds.append((*home.split(":"), False))
    elif "--no-home" not in given:
        fatal("a box with the caller's HOME")

    box = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--uid", "1000", "--gid", "1000"]
    box += [] if CANNOT.get("net") else ["--unshare-net"]
    box += ["--cap-drop", "ALL"]
    if writable:
        box += ["--bind", str(root), "/"]
    else:
        for source, inside, _ in binds:
            if (root / Path(inside).parts[1]).is_dir():
                place = root / inside.lstrip("/")
                (place if Path(source).is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
                Path(source).is_dir() or place.touch()
        for entry in root.iterdir():
            if entry.is_symlink():
                box += ["--symlink", os.readlink(entry), f"/{entry.name}"]
            elif entry.is_dir() and entry.name not in ("usr", "proc", "dev", "tmp", "var"):
                box += ["--ro-bind", str(entry), f"/{entry.name}"]
    box += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var"]
    if "--writable" in given:  # sealing searches all of the image: there are only the programs that it needs
        libraries = [path for path in Path("/usr/lib").glob("*/") if not re.search("-linux-gnu|git-core", path.name)]
        for place in (Path("/usr/share"), Path("/usr/include"), *libraries):
            box += ["--tmpfs", str(place)] if place.is_dir() and not place.is_symlink() else []
    for source, inside, read_only in binds:
        box += ["--ro-bind" if read_only else "--bind", source, inside]
    if not writable:
        box += ["--remount-ro", "/"]
    box += ["--chdir", given.get("--pwd", "/"), "--clearenv"]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE": "1", "HOME": home.split(":")[1] if home else "/root"}
    prefix = "APPTAINERENV_"
    env |= {key.removeprefix(prefix): value for key, value in os.environ.items() if key.startswith(prefix)}
    for key, value in env.items():
        box += ["--setenv", key, value]
    print("INFO:    underlay of / required more than 50 bind mounts", file=sys.stderr, flush=True)
    # In a session of its own and not bound to this process: whoever wants it ended must find it.
    code = subprocess.Popen([*box, "--", *program], start_new_session=True).wait()
    note({"cleaned up": code})
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def note(what):
    with open(HERE / "calls.jsonl", "a") as log:
        log.write(json.dumps(what) + "\n")


def main():
    argv = sys.argv[1:]
    note({"argv": argv, "env": dict(os.environ)})
    if argv == ["--version"]:
        print(CANNOT.get("version", "apptainer version 1.3.4"))
        return
    _, (verb, *rest) = parse(argv, {"--quiet"}, set())
    {"pull": pull, "build": build, "exec": execute}[verb](rest)


main()
