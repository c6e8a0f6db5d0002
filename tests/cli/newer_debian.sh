# SPDX-License-Identifier: Apache-2.0
# newer_debian.sh -- sourced by tests that run a bundle on another machine: a bare Debian 13 with Python, made once per build directory.

# make_newer_debian BUILD_DIR: its root is in $debian, that of this machine in the file system. Ends the test with 77 where it cannot be made.
make_newer_debian() {
    debian=$(realpath "$1")/debian-trixie
    if [ "$(id -u)" -ne 0 ] || ! unshare --mount true 2>/dev/null; then
        echo "skip: a bare Debian needs root: debootstrap, chroot and mount"
        exit 77
    fi
    exec 9>"$debian.lock"
    flock 9
    [ ! -e "$debian" ] || return 0
    if ! (. "$root/scripts/lib.sh" && install_packages debootstrap) >"$work/log" 2>&1 ||
        ! { rm -rf "$debian.part" && debootstrap --variant=minbase --include=python3 trixie "$debian.part" >"$work/log" 2>&1; }; then
        tail -n 3 "$work/log"
        rm -rf "$debian.part"
        echo "skip: no bare Debian: debootstrap failed (it needs a network)"
        exit 77
    fi
    rm -rf "$debian.part/var/cache/apt" "$debian.part/var/lib/apt"
    mv "$debian.part" "$debian"
}

# copy_checkout DIR: what git has of the checkout $root.
copy_checkout() { (cd "$root" && git ls-files -z | xargs -0 cp --parents -P -t "$1"); }
