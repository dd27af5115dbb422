#!/usr/bin/env bash
# servers.sh DIRECTORY: build the servers that the tests need (kube-apiserver, kube-scheduler and kubelet 1.20.2) into a
# directory, from the source that Debian 12 has. Needs a deb-src line, golang-go (1.19), dpkg-dev, 4 GB of disk, and
# about an hour of one CPU.
set -euo pipefail
out=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/src/k8s.io"
cd "$work"
apt-get source --download-only kubernetes
tar -xf kubernetes_*.orig.tar.gz
mv kubernetes-1.20.2 src/k8s.io/kubernetes
cd src/k8s.io/kubernetes
export GOPATH=$work GOCACHE=$work/cache CGO_ENABLED=0 GO111MODULE=off GOFLAGS=

# One file is generated that the source lacks: the API server's description of its types.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
marked() { grep -rl --include='*.go' '+k8s:openapi-gen=' "$1" | xargs -n1 dirname; }
types=$({ marked pkg; cd staging/src; marked k8s.io | grep -vE '^k8s.io/(code-generator|sample-apiserver)/' | sed 's,^,vendor/,'; } |
    sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$types" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" --output-base "$work/made"
sed '/^\/\/ +build/d' "$work/made/k8s.io/kubernetes/pkg/generated/openapi/zz_generated.openapi.go" \
    >pkg/generated/openapi/zz_generated.openapi.go

for server in kube-apiserver kube-scheduler kubelet; do
    go build -trimpath -o "$out/" "./cmd/$server"
done
