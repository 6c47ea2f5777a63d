#!/bin/sh
# Install the Smaragdine daemon and command on this machine. Running it again upgrades; nothing is done twice.
set -eu

usage() {
    cat <<'HELP'
usage: install.sh [options]

  --prefix DIR    where the virtual environment goes (default: /opt/smaragdine)
  --group NAME    who may ask the daemon (default: smaragdine); made where it does not exist
  --from WHAT     a checkout, a wheel, or a requirement for pip (default: this checkout, else smaragdine)
  --python EXE    Python 3.11 or later (default: python3)
  --no-systemd    no unit
  --uninstall     remove what this script installed
  --help

With DESTDIR set, accounts, unit and link go below it (for packages and tests).
HELP
}

default_prefix=/opt/smaragdine
prefix=$default_prefix
group=smaragdine
from=
python=python3
systemd=yes
uninstall=no
destdir=${DESTDIR:-}

say() { printf '%s\n' "$*"; }
fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --prefix | --group | --from | --python)
            [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 needs a value. See install.sh --help"
            case $1 in
                --prefix) prefix=${2%/} ;;
                --group) group=$2 ;;
                --from) from=$2 ;;
                --python) python=$2 ;;
            esac
            shift 2
            ;;
        --no-systemd)
            systemd=no
            shift
            ;;
        --uninstall)
            uninstall=yes
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail "unknown option $1. See install.sh --help" ;;
    esac
done

case $prefix in
    /?*) ;;
    *) fail "--prefix must be an absolute path, and not /" ;;
esac
case $group in
    -* | *[!A-Za-z0-9_-]*) fail "$group is no name for a group" ;;
esac

account=smaragdine
marker=$prefix/.installed-by-smaragdine
unit=$destdir/etc/systemd/system/smaragdine.service
link=$destdir/usr/local/bin/smaragdine
root=no
[ "$(id -u)" = 0 ] && root=yes
# Only where systemd runs, and on this machine itself, is it told anything.
manager=no
if [ "$systemd" = yes ] && [ "$root" = yes ] && [ -z "$destdir" ] && [ -d /run/systemd/system ]; then
    manager=yes
fi

# The daemon's user must be able to read what is installed.
umask 022

if [ "$uninstall" = yes ]; then
    # Another installation's daemon is not ours to stop.
    if [ -e "$unit" ] && grep -qF "$prefix/bin/smaragdine" "$unit"; then
        [ "$manager" = no ] || systemctl disable --now smaragdine.service >/dev/null 2>&1 || true
        rm -f "$unit"
        say "removed $unit"
        [ "$manager" = no ] || systemctl daemon-reload
    fi
    if [ -L "$link" ] && [ "$(readlink "$link")" = "$prefix/bin/smaragdine" ]; then
        rm -f "$link"
        say "removed $link"
    fi
    if [ -e "$marker" ]; then
        rm -rf "$prefix"
        say "removed $prefix"
    elif [ -e "$prefix" ]; then
        fail "$prefix was not made by this script: it is left as it is"
    fi
    say "left: the group $group and the user $account, should files still be theirs; /var/lib/smaragdine, /var/lib/smaragdine-limits"
    exit 0
fi

# The package

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is missing or older than 3.11. Name another with --python"
if [ -e "$prefix" ] && [ ! -e "$marker" ] && [ -n "$(ls -A "$prefix")" ]; then
    fail "$prefix holds something else. Name another place with --prefix"
fi
if [ -z "$from" ]; then
    here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
    from=smaragdine
    if [ -e "$here/pyproject.toml" ] && [ -d "$here/src/smaragdine" ]; then from=$here; fi
fi
mkdir -p "$prefix"
: >"$marker"
if [ ! -x "$prefix/bin/python" ]; then
    "$python" -m venv "$prefix" || fail "no virtual environment (Debian and Ubuntu: apt install python3-venv)"
    say "made $prefix"
fi
"$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$from"
say "installed $("$prefix/bin/smaragdine" --version) in $prefix"
if [ "$root" = yes ] && [ "$prefix" = "$default_prefix" ] && [ ! -e "$link" ]; then
    mkdir -p "$(dirname "$link")"
    ln -s "$prefix/bin/smaragdine" "$link"
    say "made $link"
fi

# Accounts: a group that may ask, and a user without any rights that the daemon becomes

if [ "$root" = yes ]; then
    has() {
        if [ -z "$destdir" ]; then
            getent "$1" "$2" >/dev/null
        else
            grep -q "^$2:" "$destdir/etc/$1" 2>/dev/null
        fi
    }
    add() {
        command -v "$1" >/dev/null || fail "there is no $1 here: make the group $group and the user $account yourself"
        tool=$1
        shift
        if [ -n "$destdir" ]; then "$tool" --prefix "$destdir" "$@"; else "$tool" "$@"; fi
    }
    if ! has group "$group"; then
        add groupadd --system "$group"
        say "made the group $group"
    fi
    if ! has passwd "$account"; then
        own=--user-group
        if has group "$account"; then own="--gid $account"; fi
        # Two words where it is two.
        # shellcheck disable=SC2086
        add useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin $own "$account"
        say "made the user $account"
        # A daemon that ran before this user was there wrote as nobody.
        if [ -z "$destdir" ] && [ -d /var/lib/smaragdine ]; then
            chown -R -h "$account:" /var/lib/smaragdine
        fi
    fi
fi

# The unit

if [ "$systemd" = yes ] && [ "$root" = yes ]; then
    mkdir -p "$(dirname "$unit")"
    "$prefix/bin/smaragdine" daemon --systemd --group "$group" >"$unit.new" || {
        rm -f "$unit.new"
        fail "no unit was written"
    }
    if cmp -s "$unit.new" "$unit"; then
        rm "$unit.new"
    else
        mv "$unit.new" "$unit"
        say "wrote $unit"
        [ "$manager" = no ] || systemctl daemon-reload
    fi
fi

# What is left to do

say ""
say "Next:"
if [ "$root" = no ]; then
    say "  accounts and unit need root: sudo $0 --prefix $prefix"
elif [ "$systemd" = yes ]; then
    say "  systemctl enable --now smaragdine     # after an upgrade: systemctl restart smaragdine"
else
    say "  $prefix/bin/smaragdine daemon --group $group"
fi
say "  usermod -aG $group USER               # for each user who may ask it; they log in again"
say "  $prefix/bin/smaragdine doctor         # what can be measured here"
