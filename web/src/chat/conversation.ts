import { useRef, useState } from "preact/hooks";

import { stream, told } from "../api";
import { AnswerReader, messagesOf, type Chunk, type Exchange } from "./exchange";
import { requestFields, type Settings } from "./sampling";

// Answers may grow faster than anybody reads, or a browser lays out.
const SHOW_MILLISECONDS = 40;

export interface Conversation {
  exchanges: readonly Exchange[];
  isStreaming: boolean;
  send: (prompt: string, model: string, settings: Settings) => Promise<void>;
  stop: () => void;
  clear: () => void;
}

export function useConversation(): Conversation {
  const [exchanges, setExchanges] = useState<readonly Exchange[]>([]);
  const running = useRef<AbortController | null>(null);
  const numbers = useRef(0);

  const show = (exchange: Exchange) => {
    const copy = { ...exchange, tokens: [...exchange.tokens] };
    setExchanges((before) => before.map((each) => (each.id === copy.id ? copy : each)));
  };

  const send = async (prompt: string, model: string, settings: Settings) => {
    const exchange: Exchange = {
      id: numbers.current++,
      prompt,
      reasoning: "",
      content: "",
      tokens: [],
      state: "streaming",
      error: "",
      facts: [],
      explanation: null,
    };
    const body = {
      model,
      messages: messagesOf(settings.system, exchanges, prompt),
      stream: true,
      stream_options: { include_usage: true },
      explain: true,
      ...requestFields(settings),
    };
    const reader = new AnswerReader(exchange);
    const controller = (running.current = new AbortController());
    let timer: ReturnType<typeof setTimeout> | undefined;
    setExchanges([...exchanges, { ...exchange }]);
    try {
      await stream<Chunk>("/v1/chat/completions", body, controller.signal, (chunk) => {
        reader.take(chunk);
        timer ??= setTimeout(() => {
          timer = undefined;
          show(exchange);
        }, SHOW_MILLISECONDS);
      });
      exchange.state = "done";
    } catch (error) {
      exchange.state = controller.signal.aborted ? "stopped" : "failed";
      exchange.error = told(error);
    }
    clearTimeout(timer);
    exchange.facts = reader.facts();
    if (running.current === controller) running.current = null;
    show(exchange);
  };

  return {
    exchanges,
    isStreaming: exchanges.at(-1)?.state === "streaming",
    send,
    stop: () => running.current?.abort(),
    clear: () => {
      running.current?.abort();
      setExchanges([]);
    },
  };
}
