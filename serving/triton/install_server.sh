#!/usr/bin/env bash
# Triton without a container, for tests and laptops: the real tritonserver that the wheel of nvidia-pytriton carries.
#
#   serving/triton/install_server.sh DIR        about 200 MB in DIR; needs python3 with pip, and libpython as a shared library
#   DIR/tritonserver --model-repository REPOSITORY --http-port 8000
#
# It has the Python backend only, which the repositories of `python -m serving.triton` use, unless layout=ensemble with
# dense_format=onnx. PYTHON names another interpreter than python3: that of the environment whose packages the models import.
set -euo pipefail
target=$(realpath -m "${1:?usage: install_server.sh DIR}")
python=${PYTHON:-python3}
if [ -e "$target/tritonserver" ]; then
    echo "$target/tritonserver is there"
    exit 0
fi
mkdir -p "$target"
"$python" -m pip download --quiet --no-deps --only-binary=:all: nvidia-pytriton==0.7.0 --dest "$target/wheel"
"$python" -m zipfile -e "$target"/wheel/*.whl "$target/files"
rm -r "$target/wheel"
server=$target/files/pytriton/tritonserver
read -r version prefix library < <("$python" -c '
import sys, sysconfig
print(f"{sys.version_info[0]}.{sys.version_info[1]}", sys.base_prefix, sysconfig.get_config_var("LIBDIR"))')
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"
chmod +x "$server/bin/tritonserver" "$server/backends/python/triton_python_backend_stub"
ls "$library"/libpython"$version".so* >/dev/null
cat > "$target/unfinished" <<END
#!/usr/bin/env bash
export LD_LIBRARY_PATH=$library:$target/files/nvidia_pytriton.libs\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} PYTHONHOME=$prefix
exec $server/bin/tritonserver --backend-directory $server/backends "\$@"
END
chmod +x "$target/unfinished"
mv "$target/unfinished" "$target/tritonserver"
echo "$target/tritonserver is ready, for Python $version"
