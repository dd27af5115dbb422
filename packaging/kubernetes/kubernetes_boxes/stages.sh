# What boxes run in their pods' two containers: each part is the command of an exec, so it is short and has no comments
# once it is sent. Lengths are in bytes; input has to be told by its length, as no stream can end it.

## first
# The box's first process. Once it is there, it cannot be ended from inside, as it has no handlers, nor traced, as its
# file cannot be read; and with SIGCHLD ignored the kernel reaps orphans.
until [ -x /kept/sleep ]; do sleep 0.1; done; trap "" CHLD; exec /kept/sleep 2147483647

## keep
# The keeper's first process.
trap "exit 0" TERM; sleep 2147483647 & wait

## ask
# Tells whose the programs of a box are.
echo $(id -u):$(id -g)

## probe
# Tries an address that every pod of a cluster is told, and all but isolated ones reach.
timeout 3 bash -c 'exec 3<>/dev/tcp/$KUBERNETES_SERVICE_HOST/$KUBERNETES_SERVICE_PORT' 2>/dev/null && echo reached; :

## list
# Lists what is in a tree, $1, as `inode mode type size changed path`, ended by zero bytes.
list() {
    cd -- "$1" && find . -mindepth 1 -iname .git -prune -o \( -type f -o -type l \) -printf '%i %m %y %s %C@ %P\0'
}

## listed
# After list.
list "$1"

## setup
# After list. Input: an archive for /box, of length $1; then the setup patch, of length $2. $3: owner of the files.
# $4: the image's work tree, if there is one; what follows is for seal.sh, which is in the archive then.
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
(list tree) >kept/list
install -m 0111 "$(command -v sleep)" kept/new && mv kept/new kept/sleep

## run
# Input: the program's words, of length $1, each ended by a zero byte, after $3 variables and the directory; then its
# own input, of length $2. All of it is read first: a server that cannot get rid of input answers no ping, and does not
# tell of the program's end. What the cluster tells every container is no part of a box's environment.
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

## kill
# Says whether no process is left but the first one and this one.
for try in {1..20}; do
    kill -9 -1; set -- /proc/[0-9]*
    [ $# -gt 2 ] || { echo ended; break; }
    sleep 0.05
done

## down
# Goes from directory $1 down to the one that "$3"... name; makes those that are missing if $2 is an owner. A change of
# directory that went through a link ends somewhere else.
down() {
    cd -- "$1" || exit 3
    place=$1 owner=$2; shift 2
    for part; do
        if [ -n "$owner" ] && [ ! -e "./$part" ] && [ ! -L "./$part" ]; then
            mkdir -m 755 -- "./$part" && chown "$owner" "./$part" || exit 3
        fi
        place=$place/$part
        cd -P -- "./$part" 2>/dev/null && [ "$(pwd -P)" = "$place" ] || exit 3
    done
}

## put
# After down. $1: length of the input, $2: name.
length=$1 name=$2; shift 2
new=/box/kept/put; head -c "$length" >$new && [ "$(stat -c %s $new)" = "$length" ] || exit 4
down "$@"
chmod 644 $new && chown "$owner" $new && mv -T -f -- $new "./$name" || exit 4

## get
# After down. $1: name.
name=$1; shift
down "$@"
[ -f "./$name" ] && [ ! -L "./$name" ] || exit 3
exec cat -- "./$name"

## pack
# Packs those files of a tree, $1, whose paths are the input, of length $2.
cd -- "$1" && head -c "$2" | tar --create --file=- --null --no-recursion --verbatim-files-from --files-from=-
