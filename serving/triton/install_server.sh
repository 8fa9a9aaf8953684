#!/usr/bin/env bash
# Triton without a container, for tests and laptops: the real tritonserver that the wheel of nvidia-pytriton carries.
#
#   serving/triton/install_server.sh DIR        downloads 55 MB and takes 170 MB in DIR, a virtual environment of its own
#   DIR/tritonserver --model-repository REPOSITORY --http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1
#
# It needs Linux with glibc 2.35 or later, and a Python with libpython as a shared library. It has the Python backend only, which
# the repositories of `python -m serving.triton` use, unless layout=ensemble with dense_format=onnx. PYTHON names another
# interpreter than python3: that of the environment whose packages the models import.
set -euo pipefail
target=$(realpath -m "${1:?usage: install_server.sh DIR}")
python=${PYTHON:-python3}
fail() { echo "install_server.sh: $1" >&2; exit 1; }
if [ -e "$target/tritonserver" ]; then
    echo "$target/tritonserver is there"
    exit 0
fi
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-deps --no-compile --only-binary=:all: nvidia-pytriton==0.7.0
read -r version prefix library packages < <("$target/bin/python" -c '
import sys, sysconfig
paths = (sys.base_prefix, sysconfig.get_config_var("LIBDIR"), sysconfig.get_path("platlib"))
print(f"{sys.version_info[0]}.{sys.version_info[1]}", *paths)')
server=$packages/pytriton/tritonserver
stub=$server/backends/python/triton_python_backend_stub
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$stub"
chmod +x "$server/bin/tritonserver" "$stub"
cat > "$target/unfinished" <<END
#!/usr/bin/env bash
export LD_LIBRARY_PATH=$library:$packages/nvidia_pytriton.libs\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} PYTHONHOME=$prefix
exec $server/bin/tritonserver --backend-directory $server/backends "\$@"
END
chmod +x "$target/unfinished"
# Neither has an option that ends with 0: what they print says whether the system could load them.
said=$("$target/unfinished" --help 2>&1) || [[ $said == Usage:* ]] || fail "the server does not run here: ${said:0:300}"
said=$(LD_LIBRARY_PATH=$library "$stub" 2>&1) || [[ $said == *"Expected 9 arguments"* ]] ||
    fail "its Python backend does not run here: ${said:0:300}"
mv "$target/unfinished" "$target/tritonserver"
echo "$target/tritonserver is ready, for Python $version"
