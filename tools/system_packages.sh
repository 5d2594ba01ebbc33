#!/bin/sh
# Get the programs that some tests need and pip cannot bring, where that needs no question: with apt, as root or with a
# sudo that asks for no password.  Anywhere else say what is missing and go on; those tests are skipped then.
get() { # command, package, what is skipped without it
    command -v "$1" >/dev/null && return
    if command -v apt-get >/dev/null; then
        if [ "$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi
        export DEBIAN_FRONTEND=noninteractive
        install="$sudo apt-get install -qq -y --no-install-recommends $2"
        { $install || { $sudo apt-get update -qq && $install; }; } >/dev/null 2>&1 </dev/null
    fi
    command -v "$1" >/dev/null || echo "no $2, so $3 skipped: apt install $2" >&2
}
get bwrap bubblewrap "code rewards in a sandbox are"
get chromium chromium "the tests of the report's page are"
exit 0
