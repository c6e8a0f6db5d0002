# SPDX-License-Identifier: Apache-2.0
# Completion for fish: the program itself knows its commands and options; where it has no candidate,
# fish completes files.
function __ballast_candidates
    set -l words (commandline -opc) (commandline -ct)
    $words[1] help --complete $words[2..-1] 2>/dev/null
end
complete -c ballast -f -n 'count (__ballast_candidates) >/dev/null' -a '(__ballast_candidates)'
