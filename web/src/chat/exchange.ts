/** A token of an answer, with the most likely ones in its place. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

/** What the page shows of how an answer was served, as the server explains it. */
export interface Explanation {
  implementation: { name: string; reason: string; dtype: string; kernels: string } | null;
  sampling: Record<string, { value: unknown; source: string }>;
  truncation: { asked: number; given: number } | null;
  num_preemptions: number;
  prepare_seconds: number;
  queue_seconds: number | null;
  prefill_seconds: number | null;
  decode_seconds: number | null;
  grammar: { kind: string; compile_seconds: number; mask_seconds: number } | null;
}

/** What was said and what came back. */
export interface Exchange {
  id: number;
  prompt: string;
  reasoning: string;
  content: string;
  tokens: Token[];
  state: "streaming" | "done" | "stopped" | "failed";
  /** Why it failed, in words. */
  error: string;
  /** Counts and times, once it has ended. */
  facts: string[];
  /** How it was served, once it is complete. */
  explanation: Explanation | null;
}

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

interface WireToken {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

/** What the page reads of a chunk of `/v1/chat/completions`. */
export interface Chunk {
  choices: {
    delta: { content?: string | null; reasoning?: string | null };
    logprobs?: { content?: WireToken[] | null } | null;
    finish_reason?: string | null;
  }[];
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens?: number | null } | null;
  } | null;
  explanation?: Explanation;
}

/** The conversation so far as the API takes it; what brought no answer is left out. */
export function messagesOf(system: string, exchanges: readonly Exchange[], prompt: string): Message[] {
  const messages: Message[] = system.trim() === "" ? [] : [{ role: "system", content: system }];
  for (const { prompt: asked, content } of exchanges) {
    if (content !== "") messages.push({ role: "user", content: asked }, { role: "assistant", content });
  }
  return [...messages, { role: "user", content: prompt }];
}

/** Reads the chunks of one answer into its exchange, and measures. */
export class AnswerReader {
  #start = performance.now();
  #first: number | null = null;
  #reason = "";
  #usage: Chunk["usage"] = null;

  constructor(readonly exchange: Exchange) {}

  take(chunk: Chunk): void {
    this.#usage = chunk.usage ?? this.#usage;
    this.exchange.explanation = chunk.explanation ?? this.exchange.explanation;
    for (const { delta, logprobs, finish_reason } of chunk.choices) {
      if (delta.content || delta.reasoning || logprobs?.content?.length) this.#first ??= performance.now();
      this.exchange.reasoning += delta.reasoning ?? "";
      this.exchange.content += delta.content ?? "";
      for (const { token, logprob, top_logprobs } of logprobs?.content ?? []) {
        const top = top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob }));
        this.exchange.tokens.push({ text: token, logprob, top });
      }
      this.#reason = finish_reason ?? this.#reason;
    }
  }

  /** What there is to tell of an answer that has ended. */
  facts(): string[] {
    const facts: string[] = [];
    const now = performance.now();
    const reasons: Record<string, string> = { length: "cut off at the limit of tokens", stop: "complete" };
    if (this.#reason !== "") facts.push(reasons[this.#reason] ?? this.#reason);
    if (this.#first !== null) facts.push(`first token after ${((this.#first - this.#start) / 1000).toFixed(2)} s`);
    if (this.#usage && this.#first !== null) {
      const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: details } = this.#usage;
      const rate = count > 1 ? `, ${((1000 * (count - 1)) / (now - this.#first)).toFixed(1)} a second` : "";
      facts.push(`${count} tokens${rate}`, `${prompt} of the prompt, ${details?.cached_tokens ?? 0} of them cached`);
    }
    return facts;
  }
}
