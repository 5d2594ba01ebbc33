#!/bin/sh
# Get bubblewrap, in which rewards run programs of a model, where that needs no question: with apt, as root or with a
# sudo that asks for no password.  Anywhere else say what is missing and go on; the tests of the sandbox are skipped then.
command -v bwrap >/dev/null && exit 0
if command -v apt-get >/dev/null; then
    if [ "$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi
    export DEBIAN_FRONTEND=noninteractive
    install="$sudo apt-get install -qq -y --no-install-recommends bubblewrap"
    { $install || { $sudo apt-get update -qq && $install; }; } >/dev/null 2>&1 </dev/null
fi
command -v bwrap >/dev/null ||
    echo "no bubblewrap, so no code rewards in a sandbox, and their tests are skipped: apt install bubblewrap" >&2
exit 0
