# SPDX-License-Identifier: Apache-2.0
# Completion for bash: the program itself knows its commands and options; where it has no candidate,
# bash completes files.
_ballast() {
    local word words=() line
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        [ "$word" = = ] || words+=("$word") # bash splits --key=value into three words
    done
    [ "${COMP_WORDS[COMP_CWORD]}" != = ] || words+=("")
    COMPREPLY=()
    while IFS= read -r line; do COMPREPLY+=("${line%%$'\t'*}"); done < <(
        "${COMP_WORDS[0]}" help --complete "${words[@]}" 2>/dev/null)
}
complete -o default -o bashdefault -F _ballast ballast
