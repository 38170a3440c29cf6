#!/bin/bash
set -eu
cat > levels.sh <<'SH'
#!/bin/bash
set -u
for file in "$@"; do
    if [ ! -r "$file" ]; then
        echo "levels.sh: no such file: $file" >&2
        exit 2
    fi
done
cat -- "$@" |
    grep -E '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8} ' |
    awk '{ count[$2]++ } END { for (level in count) print count[level], level }' |
    LC_ALL=C sort -k1,1nr -k2,2
exit 0
SH
chmod +x levels.sh
