# Arguments: $0 the folder of the pipes; UID, GRADER_UID, GRADER_HOME, HOME and the agent's other folders, a colon, and
# the folders above them. On the first start, creates the agent's folders and its user name.
exec 3<"$0/life" 4>"$0/ready" || exit 1
if [ ! -e /.gangline ]; then
  uid=$1 grader=$2 grader_home=$3 home=$4
  first() { set -- "$1" "$2" "$(cat "$1")" && printf '%s\n' "$2" "$3" > "$1"; }
  shift 3
  own() {
    while [ "$1" != : ]; do mkdir -p -- "$1" && chown -R -- "$uid:$uid" "$1" || return; shift; done
    shift
    chmod o+x -- "$@"
  }
  said=$({
    own "$@" && mkdir -p /tmp && chmod 1777 /tmp &&
    { [ -z "$grader" ] || { mkdir -p -- "$grader_home" && chmod 700 -- "$grader_home" &&
      chown -R -- "$grader:$grader" "$grader_home" &&
      { [ ! -f /etc/passwd ] || first /etc/passwd "grader:x:$grader:$grader:grader:$grader_home:/bin/sh"; }; }; } &&
    { [ ! -f /etc/passwd ] || first /etc/passwd "agent:x:$uid:$uid:agent:$home:/bin/sh"; } &&
    { [ ! -f /etc/group ] || first /etc/group "agent:x:$uid:"; } &&
    : > /.gangline
  } 2>&1) || { echo "$said" >&4; exit 1; }
fi
echo ready >&4
exec 4>&-
# `wait` reaps orphans until something is written, which never happens.
{ read -r _ <&3; } &
exec 3<&-
wait $!
