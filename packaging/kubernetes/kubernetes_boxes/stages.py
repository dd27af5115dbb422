"""The shell scripts that boxes run in their pods' two containers."""

FIRST = 'until [ -x /kept/sleep ]; do sleep 0.1; done; trap "" CHLD; exec /kept/sleep 2147483647'
"""The box's first process. Once it is there, it cannot be ended from inside, as it has no handlers, nor traced, as its
file cannot be read; and with SIGCHLD ignored the kernel reaps orphans."""

KEEP = 'trap "exit 0" TERM; sleep 2147483647 & wait'
"""The keeper's first process."""

ASK = "echo $(id -u):$(id -g);"
"""Tells whose the programs of a box are."""

PROBE = """
timeout 3 bash -c 'exec 3<>/dev/tcp/$KUBERNETES_SERVICE_HOST/$KUBERNETES_SERVICE_PORT' 2>/dev/null && echo reached; :
"""
"""Tries an address that every pod of a cluster is told, and all but isolated ones reach."""

# Lists what is in a tree, $1, as `inode mode type size changed path`, ended by zero bytes.
LIST = """
cd -- "$1" && find . -mindepth 1 -iname .git -prune -o \\( -type f -o -type l \\) -printf '%i %m %y %s %C@ %P\\0'
"""

# Input: $1 bytes, an archive for /box; then $2 bytes, the setup patch. $3: owner of the files. $4: image's work tree,
# if there is one; what follows is for seal.sh, which is in the archive then.
SETUP = """
set -euo pipefail
patch=$2 owner=$3 work=$4; cd /box
head -c "$1" | tar -xf - --no-same-owner
shift 4
if [ -n "$work" ]; then
    cp -a "$work/." tree
    head -c "$patch" >/setup.diff
    bash kept/seal.sh /box/tree /box/home "$owner" "$@"
    cp -a tree kept/old
fi
chmod 755 . tree home kept; chmod 1777 tmp
chown -R "$owner" tree home
set -- tree; (
LIST
) >kept/list
install -m 0111 "$(command -v sleep)" kept/new && mv kept/new kept/sleep
""".replace("LIST\n", LIST)

# Input: $1 bytes, the program's words, each ended by a zero byte, after $3 variables and the directory; then $2 bytes
# for the program. All of it is read first: a server that cannot get rid of input answers no ping, and does not tell of
# the program's end. What the cluster tells every container is no part of a box's environment.
RUN = """
until IFS= read -r -d '' first </proc/1/cmdline && [ "$first" = /kept/sleep ]; do sleep 0.02; done
mapfile -d '' -t words < <(head -c "$1")
input=/dev/null count=$3; [ "$2" = 0 ] || { input=$(mktemp -p /tmp) && head -c "$2" >"$input" || exit 126; }
exec <"$input"; [ "$2" = 0 ] || rm -f "$input"
unset ${!KUBERNETES_*}; set -o posix; LIMITS set +o posix
cd -- "${words[0]}" || exit 126
for ((i = 1; i <= count; i++)); do export "${words[i]}"; done
set -- "${words[@]:count + 1}"; unset words i count input first
"$@"
code=$?; kill -9 -1 2>/dev/null; exit $code
"""

KILL = """
for try in {1..20}; do
    kill -9 -1; set -- /proc/[0-9]*
    [ $# -gt 2 ] || { echo ended; break; }
    sleep 0.05
done
"""
"""Says whether no process is left but the first one and this one."""

# Goes from directory $1 down to the one that "$3"... name; makes those that are missing if $2 is an owner. A change of
# directory that went through a link ends somewhere else.
_DOWN = """
cd -- "$1" || exit 3
place=$1 owner=$2; shift 2
for part; do
    if [ -n "$owner" ] && [ ! -e "./$part" ] && [ ! -L "./$part" ]; then
        mkdir -m 755 -- "./$part" && chown "$owner" "./$part" || exit 3
    fi
    place=$place/$part
    cd -P -- "./$part" 2>/dev/null && [ "$(pwd -P)" = "$place" ] || exit 3
done
"""

# $1: bytes of input, $2: name.
PUT = f"""
length=$1 name=$2; shift 2
new=/box/kept/put; head -c "$length" >$new && [ "$(stat -c %s $new)" = "$length" ] || exit 4
{_DOWN}
chmod 644 $new && chown "$owner" $new && mv -T -f -- $new "./$name" || exit 4
"""

# $1: name.
GET = f"""
name=$1; shift
{_DOWN}
[ -f "./$name" ] && [ ! -L "./$name" ] || exit 3
exec cat -- "./$name"
"""

# Packs those files of a tree, $1, whose paths are the input, of $2 bytes.
PACK = """
cd -- "$1" && head -c "$2" | tar --create --file=- --null --no-recursion --verbatim-files-from --files-from=-
"""
