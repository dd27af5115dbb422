# This runs once in a container of a task's image, which becomes the sealed image: it replaces the history of the work
# tree by one commit with a fixed author and date. Arguments: work tree, HOME of a box, user of the image, the name by
# which eval scripts ask for the commit (may be empty), paths to remove. /setup.diff is applied first, if it is not empty.
# It prints lines "key value": what it found, and what the result is like.
set -euo pipefail
work=$1 home=$2 user=${3:-0} base=$4
shift 4
cd "$work"
for tool in git find; do
  command -v $tool >/dev/null || { echo "missing $tool"; exit 3; }
done

# The new files will belong to uid:gid of the image's user.
name=${user%%:*} group=
case $user in *:*) group=${user#*:} ;; esac
case $name in *[!0-9]*) uid=$(id -u "$name") ;; *) uid=$name ;; esac
case $group in
  '') gid=$(id -g "$name" 2>/dev/null || echo 0) ;;
  *[!0-9]*) gid=$(sed -n "s/^$group:[^:]*:\([0-9]*\):.*/\1/p" /etc/group) ;;
  *) gid=$group ;;
esac
echo "uid $uid"
echo "gid $gid"

scratch=$(mktemp -d)
export HOME=$scratch XDG_CONFIG_HOME=$scratch GIT_CONFIG_NOSYSTEM=1
printf '[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n[core]\n\tlogAllRefUpdates = false\n\thooksPath = /dev/null\n' >"$HOME/.gitconfig"
export GIT_AUTHOR_NAME=task GIT_AUTHOR_EMAIL=task@example.com GIT_AUTHOR_DATE='2025-01-01T00:00:00 +0000'
export GIT_COMMITTER_NAME=task GIT_COMMITTER_EMAIL=task@example.com GIT_COMMITTER_DATE='2025-01-01T00:00:00 +0000'

# Files that are tracked now stay tracked, even if ignore rules name them.
{ git ls-files -z 2>/dev/null || true; } | while IFS= read -r -d '' path; do
  if [ -L "$path" ] || [ -f "$path" ]; then printf '%s\0' "$path"; fi
done >"$scratch/tracked"
git ls-files -z --others -- '*.pyc' >"$scratch/compiled" 2>/dev/null || true

[ ! -f .git ] || echo "outside .git is a file: $(head -n 1 .git)"
find . -mindepth 2 -iname .git -print -prune | while IFS= read -r path; do
  echo "removed $path"
  rm -rf "$path"
done
rm -rf .git
git init -q --template= .
[ ! -s /setup.diff ] || git apply --whitespace=nowarn /setup.diff
rm -rf -- /setup.diff "$@"
# Compiled files that do not belong to the source as it is now may hold the solution: the setup patch has planted a bug, or
# the image was made from a later commit. Python would ignore most of them anyway.
while IFS= read -r -d '' path; do
  source=$(printf %s "$path" | sed -n 's,\(^\|/\)__pycache__/\([^/.]*\)\.[^/]*$,\1\2.py,p')
  if [ ! -f "$source" ] ||
    [ "$(od -A n -t u4 -j 8 -N 8 "$path" | tr -s ' ')" != " $(stat -c '%Y %s' "$source")" ]; then
    echo "stale $path"
    rm -f -- "$path"
  fi
done <"$scratch/compiled"
git symbolic-ref HEAD refs/heads/main
git add -A .
git update-index -z --add --remove --stdin <"$scratch/tracked"
git commit -q --no-verify --allow-empty -m 'The task'
# Eval scripts check out test files from the commit that they know.
if [ -n "$base" ] && [ "$base" != "$(git rev-parse HEAD)" ]; then
  git update-ref "refs/replace/$base" HEAD
fi
git repack -a -d -q
git prune --expire=now
rm -rf .git/logs .git/COMMIT_EDITMSG .git/description .git/branches .git/hooks
find / -xdev \( -path /proc -o -path /sys -o -path "$work" \) -prune -o \
  -type d \( -path '*/.cache/pip' -o -path '*/.cache/uv' \) -prune -print0 2>/dev/null |
  while IFS= read -r -d '' path; do rm -rf -- "$path" && echo "cache $path"; done || true
mkdir -p "$home"
if [ "$uid:$gid" != 0:0 ]; then chown -R "$uid:$gid" .git "$home"; fi

# Describe the result; the caller refuses anything but one commit, its replacement name, and no unreachable object.
export GIT_NO_REPLACE_OBJECTS=1
echo "commits $(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$')"
echo "unreachable $(git fsck --unreachable --no-reflogs 2>/dev/null | grep -c '^unreachable' || true)"
git for-each-ref --format='ref %(refname)'
git remote | sed 's/^/remote /'
[ ! -s .git/objects/info/alternates ] || echo "alternates $(head -n 1 .git/objects/info/alternates)"
git status --porcelain | head -n 20 | sed 's/^/dirty /'

# Report what is left that could tell the answer; people judge it.
find . -path ./.git -prune -o \( -name '*.orig' -o -name '*.rej' -o -name '*.bundle' \) -print | sed 's/^/leftover /'
find / -xdev \( -path /proc -o -path /sys -o -path "$work" -o -path "$scratch" \) -prune -o \
  \( -name .git -o -name '*.bundle' -o -name '*.pack' \) -print | sed 's/^/repository /' || true # without root, some directories cannot be read
find / -xdev \( -path /proc -o -path /sys -o -path "$work" \) -prune -o -name direct_url.json -exec grep -l vcs_info {} + |
  sed 's/^/installed_from /' || true # grep fails if it finds nothing, which is good
# Report what would configure an agent.
{
  find . -path ./.git -prune -o \( -name .claude -o -name .mcp.json -o -name 'CLAUDE*.md' -o -name AGENTS.md \) -print -prune
  find /etc/claude-code /root/.claude* "$home"/.claude* "$home/.own" -maxdepth 0 2>/dev/null || true
  env | grep -oE '^(ANTHROPIC|CLAUDE)_[A-Z_]*' || true
} | sort -u | head -n 20 | sed 's/^/configures /'
# Another copy of the work tree's packages may be a later one: installed, vendored by another package, built, or packed.
for package in */__init__.py {src,lib}/*/__init__.py *.egg-info/PKG-INFO {src,lib}/*.egg-info/PKG-INFO; do
  package=${package%/*}
  package=${package%.egg-info}
  if [ -d "$package" ] || [ -d "$package.egg-info" ]; then echo "${package##*/}"; fi
done | sort -u >"$scratch/names"
find / -xdev \( -path /proc -o -path /sys -o -path "$scratch" -o -path "$work/.git" \) -prune -o -type d \
  \( -name site-packages -o -name dist-packages -o -name '*vendor*' -o -name 'extern*' -o -name third_party \
  -o -name '*.egg' -o -path "$work/build/lib*" \) -print 2>/dev/null | while IFS= read -r packages; do
  case $packages in "$work"/build/lib*) ;; "$work"/*) continue ;; esac
  while IFS= read -r package; do
    if [ -f "$packages/$package/__init__.py" ]; then echo "copy $packages/$package"; fi
  done <"$scratch/names"
done || true
find / -xdev \( -path /proc -o -path /sys -o -path "$scratch" -o -path "$work/.git" \) -prune -o -type f \
  \( -name '*.whl' -o -name '*.egg' -o -name '*.conda' -o -name '*.zip' -o -name '*.tgz' -o -name '*.tar.*' \) \
  -print 2>/dev/null | while IFS= read -r path; do
  archive=$(printf %s "${path##*/}" | tr 'A-Z.-' 'a-z__')
  while IFS= read -r package; do
    case $archive in "$(printf %s "$package" | tr 'A-Z.-' 'a-z__')"_[0-9]*) echo "archive $path" ;; esac
  done <"$scratch/names"
done || true
rm -rf "$scratch"
echo "sealed yes"
