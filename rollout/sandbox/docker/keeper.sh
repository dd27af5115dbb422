# What a host of boxes runs for one connection, read by `bash -s -- TOKEN TTL SOCKET` from the connection itself
# (rollout/sandbox/docker/link.py). It says what the host has, runs the lines that follow as commands, and answers each
# with one line: the exit status and what the command wrote. When there are no more lines, or none for TTL seconds, it
# removes the connection's boxes and files. So boxes end with the process that made them, wherever that was.
#
# ~/.cache/claude-code-rl/hosts/ENGINE/leases/TOKEN   files of a connection; its time is that of the last line
# ~/.cache/claude-code-rl/hosts/ENGINE/copies/DIGEST  what boxes show of the other machine; its time is the last use
main() {
    token=$1 ttl=$2 socket=$3
    trap '' HUP PIPE TERM INT
    problem() { echo "problem $token $*"; exit 1; }

    if [ -z "$socket" ]; then
        user=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
        for socket in "${DOCKER_HOST#unix://}" /var/run/docker.sock "$user/docker.sock" /run/podman/podman.sock \
            "$user/podman/podman.sock"; do
            [ -S "$socket" ] && break
        done
    fi
    [ -S "$socket" ] || problem "it has no socket of a container engine at $socket"
    [ -w "$socket" ] || problem "$(id -un) may not use its container engine ($socket)"
    if command -v docker >/dev/null; then
        engine=(docker -H "unix://$socket")
    elif command -v podman >/dev/null; then
        engine=(podman --remote --url "unix://$socket")
    else
        problem "it has neither the program docker nor podman, which remove its boxes"
    fi
    command -v tar >/dev/null || problem "it has no tar"
    home=$HOME/.cache/claude-code-rl/hosts/$(printf %s "$socket" | cksum | cut -d' ' -f1)
    lease=$home/leases/$token
    [[ $home =~ ^[[:alnum:]/._+@-]+$ ]] || problem "the name of $home has characters that commands would need to quote"
    said=$({ mkdir -p "$home/copies" "$lease" && echo "$ttl" >"$lease/ttl"; } 2>&1) || problem "$said"
    [ ${#lease} -le 95 ] || problem "$lease is too long for the path of a socket"
    find "$home/copies" -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} + 2>/dev/null

    # Docker may be busy, and nobody waits for this.
    sweep </dev/null >/dev/null 2>&1 &
    echo "ready $token $(nproc) $home"
    echo "$socket"
    while read -r -t "$ttl" line; do
        touch -c "$lease"
        said=$(eval "$line" 2>&1 </dev/null)
        echo "$? ${said//$'\n'/ }"
        ((++lines % 12)) || { sweep </dev/null >/dev/null 2>&1 & } # the braces: what counts is this shell
    done
    remove "$lease"
    sleep 2 # a box that was being made
    remove "$lease"
}

# Remove the boxes of connections that nobody keeps any more, each after its own time: their hosts, or what ran there, were
# killed.
sweep() {
    for old in "$home"/leases/*; do
        [ $(($(date +%s) - $(stat -c %Y "$old"))) -le "$(cat "$old/ttl" || echo "$ttl")" ] || remove "$old"
    done
}

remove() {
    boxes=$("${engine[@]}" ps -aq --filter "label=claude-code-rl.lease=$1") || return
    if [ -n "$boxes" ]; then
        "${engine[@]}" rm -fv $boxes </dev/null
    fi >/dev/null 2>&1
    rm -rf "$1"
}

main "$@"; exit # in one line: the next one is already for `main` to read
