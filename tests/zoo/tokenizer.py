"""The byte-level tokenizer of the tiny models: 512 ids, any text round-trips."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.zoo.configs import NUM_PLACEHOLDER_IDS, VOCAB_SIZE

SPECIALS = ["<pad>", "<s>", "</s>"]

# Learnt once by byte-pair encoding and frozen, so that ids never change: first|second, most frequent first.
# Bytes are written as the ByteLevel alphabet does: Ġ is a space, Ċ a newline.
MERGES = r"""
Ġ|Ġ ĠĠ|ĠĠ i|n ĠĠĠĠ|ĠĠĠĠ ĠĠ|Ġ Ġ|t o|r a|t in|g ĠĠĠĠ|ĠĠĠ e|d h|e o|n Ċ|ĠĠĠĠĠĠĠ d|ing r|e Ġ|a Ċ|ĠĠĠĠĠĠĠĠ Ġ|o >|> u|t
Ġ|s 0|0 m|b Ġ|e Ġt|he mb|ed mbed|ding :|` Ġ|: Ġ|w l|e e|n Ġ|m Ġ|c r|a Ġ|0 Ġ|n e|r Ġo|f a|l Ċ|ĠĠĠ i|s Ġ|in d|i i|g
Ġ|= Ġ|b Ġe|mbedding a|r t|i Ġ|f p|ut `|` m|at Ġ|>> Ġ>>|> e|s en|s mat|h e|ig h|t Ġ|[ Ġ|p or|m eig|ht ]|, t|r
ĠĠĠĠĠĠĠĠ|ĠĠĠĠĠĠĠĠ c|h s|e t|e Ċ|ĊĠĠĠ Ġ|( Ġ|- re|s Ġa|n ens|or o|d Ġt|o a|d a|m i|d i|z Ġ|l ĊĠĠĠĠĠĠĠĠ|ĠĠĠ a|s c|t f|e
p|e v|e x|t a|n g|ra Ġ|is 00|00 Ġm|od te|xt id|x i|t o|o p|ti u|res Ġ|# Ġ|1 at|tr ad|ding )|: E|mbedding e|t l|l
n|orm o|m Ġ|I Ġ|d Ġ|`` at|ures Ġc|on Ġf|or Ġan|d )|` h|a o|t p|le u|e u|le w|eight Ġ|z Ġ|re Ġt|h ĊĠĠĠĠĠĠĠĠ|ĠĠĠĠĠĠĠĠ
ĊĠĠĠĠĠĠĠĠ|ĠĠĠĠĠĠĠ Ġw|eight fe|atures (|[ \|_ Ġ|3 Ġt|or Ġt|ensor ĊĠĠĠĠĠĠĠĠ|ĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠ Ġin|put Ġ[|- am|ple iz|e
Ġmod|ule ha|pe Ġz|oo Ġtor|ch (|) a|b a|x a|in c|l i|on l|o s|q t|s Ġ|2 Ġ|\ Ġ|` Ġ|u Ġ|di Ġ|ve on|e Ġo|pti Ġw|he ra|n
er|s Ġb|e ct|or Ġve|ctor .|. 7|8 T|r T|ensor ]|) `|. c|es e|e i|as i|ll o|ut }|)` Ġ|+ Ġ|v Ġ|gra Ġo|ut Ġs|ize Ġs|hape
:`|( Ġw|ill Ġn|orm di|en Ġembedding|s Ġp|adding gra|d ĠI|f ([|[ ĊĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠ|ĠĠĠĠĠĠĠĠ ab|le lo|at
Ġopti|on Tr|ue Ġgra|dien (|" 0|3 1|6 6|4 6|9 :|: a|c a|u a|ch m|ax p|ar p|adding q|u r|t t|ain v|er x|ample Ġ|A Ġ|F
Ġ|S Ġ|T Ġ|W Ġ|g in|t Ġs|t Ġe|ach Ġn|n Ġn|ot Ġb|ias tr|i as|s it|h Ġth|at
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly 512 ids: 3 specials, 256 bytes, 237 merges, then `<extra_0>` to `<extra_15>`."""
    merges = [tuple(pair.split("|")) for pair in MERGES.split()]
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in merges)]
    bpe = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIALS)
    bpe.add_special_tokens([f"<extra_{i}>" for i in range(NUM_PLACEHOLDER_IDS)])
    assert bpe.get_vocab_size() == VOCAB_SIZE, bpe.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )
