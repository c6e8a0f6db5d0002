# SPDX-License-Identifier: Apache-2.0
# lib.sh -- code shared by the scripts. Sourced by a POSIX shell whose working directory is the repository.

# The one list of packages (Debian 12 names): needed to build and test on a bare system.
packages="gcc g++ libc6-dev cmake ninja-build pkg-config
    libjansson-dev libyaml-dev libpcre2-dev libutf8proc-dev libxxhash-dev zlib1g-dev libzstd-dev libcmocka-dev liburing-dev
    libhwloc-dev libmimalloc-dev libsodium-dev
    openmpi-bin libopenmpi-dev iproute2 strace python3"
# Needed only by `scripts/test --full`.
packages_full="clang libclang-rt-14-dev clang-format"

JOBS=${JOBS:-$(nproc)}

awk() { LC_ALL=C command awk "$@"; } # decimal points in every locale

say() { printf '%s\n' "== $*"; }

fail() {
    printf '%s\n' "error: $*" >&2
    exit 1
}

# The packages of "$@" that are not installed.
missing_packages() {
    for package in "$@"; do
        case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) in
        *' installed') ;;
        *) printf '%s ' "$package" ;;
        esac
    done
}

# install_packages PACKAGE ...: installs the missing ones, as root or through sudo. Without apt it only prints the needed ones:
# the configure step then names missing packages.
install_packages() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        say "no apt here; needed are: $*"
        return 0
    fi
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    as_root=
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "not root and no sudo; install by hand: $missing"
        as_root=sudo
    fi
    say "installing $missing"
    # shellcheck disable=SC2086  # a list of words
    $as_root apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 ||
        { $as_root apt-get update -qq &&
            $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } ||
        fail "apt-get could not install: $missing"
}

# kill_at FILE COMMAND ...: sends SIGKILL to the command as soon as FILE exists. Fails if the command ended before.
kill_at() {
    file=$1
    shift
    "$@" &
    child=$!
    while [ ! -e "$file" ] && kill -0 "$child" 2>/dev/null; do sleep 0.02; done
    kill -9 "$child" 2>/dev/null || true
    status=0
    wait "$child" 2>/dev/null || status=$?
    [ "$status" -eq 137 ]
}

# The libraries of others that the files need, the C library's apart.
needed_libraries() {
    ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
        grep -Ev '/(ld-linux.*|lib(c|m|dl|rt|pthread|resolv))\.so[.0-9]*$'
}

# copy_licenses DIRECTORY FILE ...: the licenses of the libraries that the files need, by the names of their packages.
copy_licenses() {
    licenses=$1
    shift
    mkdir -p "$licenses"
    for library in $(needed_libraries "$@"); do
        file=$(readlink -f "$library")
        package=$(dpkg -S "$file" "${file#/usr}" "/usr$file" 2>/dev/null | head -n 1 | cut -d : -f 1)
        [ -n "$package" ] || fail "$library belongs to no package: its license is not known"
        cp "/usr/share/doc/$package/copyright" "$licenses/$package"
    done
}

# build NAME PRESET [CMAKE ARGUMENT ...]: configures and builds build/NAME; $target, or all of it. With ccache where it is installed.
# BALLAST_WERROR=ON makes warnings errors, as in CI.
target=
build() {
    name=$1
    preset=$2
    shift 2
    if command -v ccache >/dev/null; then
        set -- "$@" -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache
    fi
    cmake --preset "$preset" -B "build/$name" -DBALLAST_TESTS=ON -DBALLAST_WERROR="${BALLAST_WERROR:-OFF}" "$@" && cmake --build "build/$name" --parallel "$JOBS" ${target:+--target "$target"}
}
