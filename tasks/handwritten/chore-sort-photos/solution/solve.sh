#!/bin/bash
set -eu
cd photos
: > index.txt
for file in *; do
    if [[ $file =~ ^IMG_([0-9]{4})([0-9]{2})([0-9]{2})_([0-9]+)[.]jpg$ ]]; then
        folder="${BASH_REMATCH[1]}/${BASH_REMATCH[2]}"
        target="$folder/${BASH_REMATCH[3]}-$(printf '%03d' "$((10#${BASH_REMATCH[4]}))").jpg"
        mkdir -p "$folder"
        mv -- "$file" "$target"
        printf '%s\t%s\n' "$target" "$file" >> index.txt
    fi
done
LC_ALL=C sort -o index.txt index.txt
